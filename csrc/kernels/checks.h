// What every device's operators check of their tensors, before anything is written.
//
// Each check throws std::runtime_error (RuntimeError in Python) that says what was expected.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "kernels/operands.h"

namespace psengine {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// flat: 1-D, contiguous, of a floating kind. tensors: floating kinds, on flat's device, numels adding up to flat's.
// layout: int64 on the CPU, from ops.layout_of(): for each tensor the number of dimensions, the sizes, and the strides
// of its place. Without it a dense tensor (whose elements fill their span exactly once, in any order of dimensions)
// travels in the order of its memory and any other in row-major order. No tensor may lie in flat's memory, and none
// that is written may overlap itself. That targets lie apart is not checked.
Fusion check_fusion(const Tensor& flat, const std::vector<Tensor>& tensors, const OptionalTensor& layout,
                    Direction direction);

// Floating kinds, the same device, shape and order of memory, which must be dense.
Accumulation check_accumulation(const Tensor& destination, const Tensor& source);

// Values and residuals: float32. All tensors: 1-D, contiguous, on one device, of sizes that fit. `format`: a
// BlockFormat's number.
Encoding check_encoding(const Tensor& payload, const Tensor& values, const OptionalTensor& residual,
                        const OptionalTensor& next, int64_t format);
Decoding check_decoding(const Tensor& into, const Tensor& payload, int64_t format, bool adds);
Selection check_selection(const Tensor& places, const Tensor& found, const Tensor& values,
                          const OptionalTensor& residual, const OptionalTensor& next);

}  // namespace psengine
