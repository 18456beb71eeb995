// What operators are given, as memory: checked, and the same on every device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace psengine {

// ---- a flat tensor and the tensors that make it up

// One tensor and its place in the flat tensor.
struct Part {
  char* data;            // the tensor's first element
  int64_t flat_offset;   // where its place begins, in elements
  int64_t numel;
  ScalarKind kind;
  // Empty where the tensor's memory, walked upwards, is in the order of its place. Otherwise the tensor's sizes and
  // strides (elements), one pair a dimension, outermost dimension of the *place* first: walking them in row-major order
  // visits the elements in the order of the place.
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct Fusion {
  char* flat;
  int64_t flat_numel;
  ScalarKind flat_kind;
  std::vector<Part> parts;

  char* place_of(const Part& part) const { return flat + part.flat_offset * int64_t(element_bytes(flat_kind)); }
};

enum class Direction { pack, unpack };

// Source times a scale is added to destination, both walked upwards in memory.
struct Accumulation {
  char* destination;
  const char* source;
  int64_t numel;
  ScalarKind destination_kind;
  ScalarKind source_kind;
};

// ---- codecs; `residual` and `next` may be null

struct BlockForm {
  BlockFormat format;
  int64_t numel;  // values in a block
  int64_t bytes;  // of a block's payload
};

struct Encoding {
  BlockForm form;
  uint8_t* payload;
  const float* values;
  const float* residual;
  float* next;
  int64_t numel;
};

struct Decoding {
  BlockForm form;
  float* into;
  const uint8_t* payload;
  int64_t numel;
  bool adds;
};

// The places and values of the largest magnitudes.
struct Selection {
  int32_t* places;
  float* found;
  const float* values;
  const float* residual;
  float* next;
  size_t numel;   // of the values
  size_t wanted;  // of places and found
};

}  // namespace psengine
