// What the fused kernels of every device have in common: a flat tensor, the tensors that make it up, and the checks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "kernels/kernels.h"

namespace psengine {

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
};

enum class Direction { pack, unpack };

// Validate one call; nothing is written before it returns.
//
// flat: 1-D, contiguous, of a floating kind. tensors: floating kinds, on flat's device, numels adding up to flat's.
// layout: int64 on the CPU, from ops.layout_of(): for each tensor the number of dimensions, the sizes, and the strides
// of its place. Without it a dense tensor (whose elements fill their span exactly once, in any order of dimensions)
// travels in the order of its memory and any other in row-major order.
// Throws std::runtime_error (RuntimeError in Python), naming the tensor's index and both values; also where memory that
// is written overlaps with other memory of the call.
Fusion check_fusion(const torch::stable::Tensor& flat, const std::vector<torch::stable::Tensor>& tensors,
                    const std::optional<torch::stable::Tensor>& layout, Direction direction);

// accumulate_'s two tensors, walked upwards in memory.
struct Accumulation {
  char* destination;
  const char* source;
  int64_t numel;
  ScalarKind destination_kind;
  ScalarKind source_kind;
};

// Validate one call: floating kinds, the same device, shape and order of memory, which must be dense and not shared.
Accumulation check_accumulation(const torch::stable::Tensor& destination, const torch::stable::Tensor& source);

}  // namespace psengine
