// What the operators of codecs have in common on every device: the form of a payload, and the checks.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "kernels/kernels.h"

namespace psengine {

struct BlockForm {
  BlockFormat format;
  int64_t numel;  // values in a block
  int64_t bytes;  // of a block's payload
};

// Each throws std::runtime_error (RuntimeError in Python) that says what was expected; nothing is written before.

// A call's payload and values: contiguous, 1-D, uint8 and float32, one device, sizes that fit. `number`: a BlockFormat's.
BlockForm check_blocks(const torch::stable::Tensor& payload, const torch::stable::Tensor& values, int64_t number);

// 1-D, contiguous, float32.
void check_floats(const char* name, const torch::stable::Tensor& tensor);

// int32, as many as `found`, which is no more than `values`.
void check_places(const torch::stable::Tensor& places, const torch::stable::Tensor& found,
                  const torch::stable::Tensor& values);

// None, or like `values`.
void check_residual(const char* name, const std::optional<torch::stable::Tensor>& residual,
                    const torch::stable::Tensor& values);

}  // namespace psengine
