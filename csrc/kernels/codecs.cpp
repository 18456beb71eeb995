// Checks of a codec's call.
#include "kernels/codecs.h"

#include <stdexcept>
#include <string>

#include <torch/headeronly/core/ScalarType.h>

namespace psengine {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void refuse(const std::string& text) { throw std::runtime_error(text); }

void check_flat(const char* name, const Tensor& tensor, ScalarType type, const char* type_name) {
  if (tensor.dim() != 1 || (tensor.numel() > 1 && tensor.stride(0) != 1) || tensor.scalar_type() != type)
    refuse(std::string(name) + " must be 1-D, contiguous and of " + type_name);
}

void check_numel(const char* name, int64_t expected, int64_t got) {
  if (expected != got)
    refuse(std::string(name) + " must fit the values (expected " + std::to_string(expected) + " elements, got " +
           std::to_string(got) + ")");
}

void check_device(const char* name, const Tensor& tensor, const Tensor& values) {
  if (tensor.device() != values.device()) refuse(std::string(name) + " must be on the values' device");
}

}  // namespace

void check_floats(const char* name, const Tensor& tensor) { check_flat(name, tensor, ScalarType::Float, "float32"); }

BlockForm check_blocks(const Tensor& payload, const Tensor& values, int64_t number) {
  constexpr BlockForm kForms[] = {{BlockFormat::int8, 256, 4 + 256},
                                  {BlockFormat::fp4, 32, 1 + 16},
                                  {BlockFormat::onebit, 512, 4 + 64}};
  if (number < 0 || number > 2) refuse("format must be 0 to 2 (got " + std::to_string(number) + ")");
  const BlockForm form = kForms[number];
  check_floats("values", values);
  check_flat("payload", payload, ScalarType::Byte, "uint8");
  check_device("payload", payload, values);
  check_numel("payload", (values.numel() + form.numel - 1) / form.numel * form.bytes, payload.numel());
  return form;
}

void check_places(const Tensor& places, const Tensor& found, const Tensor& values) {
  check_flat("places", places, ScalarType::Int, "int32");
  check_numel("places", found.numel(), places.numel());
  check_device("places", places, values);
  check_device("found", found, values);
  if (found.numel() > values.numel() || values.numel() > INT32_MAX)
    refuse("found must hold no more than the values (expected at most " + std::to_string(values.numel()) + ", got " +
           std::to_string(found.numel()) + ")");
}

void check_residual(const char* name, const std::optional<Tensor>& residual, const Tensor& values) {
  if (!residual.has_value()) return;
  check_floats(name, *residual);
  check_device(name, *residual, values);
  check_numel(name, values.numel(), residual->numel());
}

}  // namespace psengine
