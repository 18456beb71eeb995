#include "kernels/checks.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

namespace psengine {
namespace {

using torch::headeronly::ScalarType;

// Messages are thrown as they are: STD_TORCH_CHECK would put the source file in front.
template <class... Values>
[[noreturn]] void fail(const Values&... values) {
  std::ostringstream message;
  ((message << values), ...);
  throw std::runtime_error(message.str());
}

// What the checks need of a tensor, read straight from the C interface: each call counts, a bucket has hundreds of
// tensors.
struct Facts {
  char* data;
  int64_t numel;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
};

Facts facts_of(const Tensor& tensor, bool is_written) {
  const AtenTensorHandle handle = tensor.get();
  Facts facts;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  void* data = nullptr;
  const void* const_data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &facts.dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &facts.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &facts.device_type));
  facts.device_index = 0;
  if (facts.device_type != aoti_torch_device_type_cpu())
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &facts.device_index));
  // Reading must not unshare copy-on-write memory.
  if (is_written) {
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle, &data));
  } else {
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &const_data));
    data = const_cast<void*>(const_data);
  }
  facts.numel = 1;
  for (int64_t i = 0; i < facts.dim; ++i) facts.numel *= sizes[i];
  facts.sizes = sizes;
  facts.strides = strides;
  facts.data = static_cast<char*>(data);
  return facts;
}

bool is_on_device_of(const Facts& facts, const Facts& other) {
  return facts.device_type == other.device_type && facts.device_index == other.device_index;
}

std::string device_name(const Facts& facts) {
  if (facts.device_type == aoti_torch_device_type_cpu()) return "cpu";
  const bool is_cuda = facts.device_type == aoti_torch_device_type_cuda();
  return (is_cuda ? "cuda:" : "type " + std::to_string(facts.device_type) + ":") + std::to_string(facts.device_index);
}

std::string list(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// The dtypes' numbers are libtorch's to choose, so they are asked for.
bool find_kind(int32_t dtype, ScalarKind* kind) {
  static const int32_t numbers[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_float16(),
                                    aoti_torch_dtype_bfloat16()};  // in ScalarKind's order
  const int32_t* const found = std::find(std::begin(numbers), std::end(numbers), dtype);
  *kind = ScalarKind(found - numbers);
  return found != std::end(numbers);
}

template <class... Name>
ScalarKind kind_of(const Facts& facts, const Name&... name) {
  ScalarKind kind;
  if (!find_kind(facts.dtype, &kind)) fail(name..., ": dtype is not covered (expected a 16-, 32- or 64-bit float)");
  return kind;
}

// ---- order of memory

bool is_row_major(const Facts& facts) {
  int64_t expected = 1;
  for (int64_t i = facts.dim - 1; i >= 0; --i) {
    if (facts.sizes[i] == 1) continue;
    if (facts.strides[i] != expected) return false;
    expected *= facts.sizes[i];
  }
  return true;
}

struct Dimension {
  int64_t size;
  int64_t place_stride;
  int64_t stride;
};

// Of a tensor that is not empty, dimensions with more than one index: with 63 of them numel would not fit into an
// int64, and torch makes no such tensor. Dimensions with one index there may be any number of.
constexpr int64_t kMostDimensions = 62;

// The dimensions with more than one index, from the longest stride of the place to the shortest; returns how many.
// The tensor must not be empty; `dimensions` holds kMostDimensions.
int64_t sorted_dimensions(const Facts& facts, const int64_t* place_strides, Dimension* dimensions) {
  int64_t count = 0;
  for (int64_t i = 0; i < facts.dim; ++i) {
    if (facts.sizes[i] == 1) continue;
    const Dimension dimension{facts.sizes[i], place_strides[i], facts.strides[i]};
    int64_t at = count++;
    for (; at > 0 && dimensions[at - 1].place_stride < dimension.place_stride; --at)
      dimensions[at] = dimensions[at - 1];
    dimensions[at] = dimension;
  }
  return count;
}

bool is_dense(const Facts& facts, const int64_t* strides) {
  Dimension dimensions[kMostDimensions];
  int64_t expected = 1;
  for (int64_t i = sorted_dimensions(facts, strides, dimensions) - 1; i >= 0; --i) {
    if (dimensions[i].place_stride != expected) return false;
    expected *= dimensions[i].size;
  }
  return true;
}

// Fill in how to walk the tensor in the order of its place. Neighbouring dimensions that one stride covers are merged.
void plan_walk(const Facts& facts, const int64_t* place_strides, Part* part) {
  Dimension dimensions[kMostDimensions];
  const int64_t count = sorted_dimensions(facts, place_strides, dimensions);
  int64_t merged = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (merged > 0 && dimensions[merged - 1].stride == dimensions[i].stride * dimensions[i].size) {
      dimensions[merged - 1].size *= dimensions[i].size;
      dimensions[merged - 1].stride = dimensions[i].stride;
    } else {
      dimensions[merged++] = dimensions[i];
    }
  }
  if (merged == 0 || (merged == 1 && dimensions[0].stride == 1)) return;
  for (int64_t i = 0; i < merged; ++i) {
    part->sizes.push_back(dimensions[i].size);
    part->strides.push_back(dimensions[i].stride);
  }
}

// Whether two indices of a strided part may be the same element: some stride is within what the shorter ones span.
bool overlaps_itself(const Part& part) {
  std::vector<std::pair<int64_t, int64_t>> by_stride;
  for (size_t i = 0; i < part.sizes.size(); ++i) by_stride.emplace_back(part.strides[i], part.sizes[i]);
  std::sort(by_stride.begin(), by_stride.end());
  int64_t last = 0;
  for (const auto& [stride, size] : by_stride) {
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

bool lies_in_flat(const Part& part, const Fusion& fusion) {
  int64_t last = part.sizes.empty() ? part.numel - 1 : 0;
  for (size_t i = 0; i < part.sizes.size(); ++i) last += (part.sizes[i] - 1) * part.strides[i];
  const char* const end = part.data + (last + 1) * int64_t(element_bytes(part.kind));
  return part.data < fusion.flat + fusion.flat_numel * int64_t(element_bytes(fusion.flat_kind)) && fusion.flat < end;
}

// Reads the numbers of ops.layout_of() in turn.
class LayoutReader {
 public:
  explicit LayoutReader(const OptionalTensor& layout) {
    if (!layout.has_value()) return;
    const Facts facts = facts_of(*layout, /*is_written=*/false);
    if (facts.dtype != aoti_torch_dtype_int64() || facts.device_type != aoti_torch_device_type_cpu() ||
        facts.dim != 1 || !is_row_major(facts))
      fail("layout must come from psengine.kernels.ops.layout_of (expected contiguous int64 of one dimension on cpu)");
    next_ = reinterpret_cast<const int64_t*>(facts.data);
    rest_ = facts.numel;
  }

  bool is_given() const { return next_ != nullptr; }

  // The strides of the next tensor's place.
  const int64_t* next_strides(const Facts& facts, size_t index) {
    const int64_t count = 1 + 2 * facts.dim;
    const int64_t* const sizes = next_ + 1;
    if (rest_ < count || *next_ != facts.dim || !std::equal(sizes, sizes + facts.dim, facts.sizes))
      fail("layout must have been made for these tensors (tensor ", index, " has sizes ",
           list(facts.sizes, facts.dim), ")");
    next_ += count;
    rest_ -= count;
    return sizes + facts.dim;
  }

  void expect_end() const {
    if (rest_ != 0) fail("layout must have been made for these tensors (it describes more of them)");
  }

 private:
  const int64_t* next_ = nullptr;
  int64_t rest_ = 0;
};

// ---- codecs

void check_flat(const char* name, const Tensor& tensor, ScalarType type, const char* type_name) {
  if (tensor.dim() != 1 || (tensor.numel() > 1 && tensor.stride(0) != 1) || tensor.scalar_type() != type)
    fail(name, " must be 1-D, contiguous and of ", type_name);
}

// Of `numel` elements, on the values' device.
void check_beside(const char* name, const Tensor& tensor, int64_t numel, const Tensor& values) {
  if (tensor.device() != values.device()) fail(name, " must be on the values' device");
  if (tensor.numel() != numel)
    fail(name, " must fit the values (expected ", numel, " elements, got ", tensor.numel(), ")");
}

const float* check_values(const Tensor& values) {
  check_flat("values", values, ScalarType::Float, "float32");
  return static_cast<const float*>(values.const_data_ptr());
}

float* check_residual(const char* name, const OptionalTensor& residual, const Tensor& values) {
  if (!residual.has_value()) return nullptr;
  check_flat(name, *residual, ScalarType::Float, "float32");
  check_beside(name, *residual, values.numel(), values);
  return static_cast<float*>(residual->mutable_data_ptr());
}

BlockForm check_payload(const Tensor& payload, const Tensor& values, int64_t format) {
  constexpr BlockForm kForms[] = {{BlockFormat::int8, 256, 4 + 256},
                                  {BlockFormat::fp4, 32, 1 + 16},
                                  {BlockFormat::onebit, 512, 4 + 64}};
  if (format < 0 || format > 2) fail("format must be 0 to 2 (got ", format, ")");
  const BlockForm form = kForms[format];
  check_flat("payload", payload, ScalarType::Byte, "uint8");
  check_beside("payload", payload, (values.numel() + form.numel - 1) / form.numel * form.bytes, values);
  return form;
}

}  // namespace

Fusion check_fusion(const Tensor& flat, const std::vector<Tensor>& tensors, const OptionalTensor& layout,
                    Direction direction) {
  const bool is_packing = direction == Direction::pack;
  const Facts flat_facts = facts_of(flat, is_packing);
  if (flat_facts.dim != 1 || !is_row_major(flat_facts))
    fail("flat must be contiguous and of one dimension (got sizes ", list(flat_facts.sizes, flat_facts.dim),
         " and strides ", list(flat_facts.strides, flat_facts.dim), ")");

  Fusion fusion;
  fusion.flat = flat_facts.data;
  fusion.flat_numel = flat_facts.numel;
  fusion.flat_kind = kind_of(flat_facts, "flat");
  fusion.parts.resize(tensors.size());
  LayoutReader places(layout);
  int64_t offset = 0;
  std::vector<int64_t> row_major_strides;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Facts facts = facts_of(tensors[i], !is_packing);
    if (!is_on_device_of(facts, flat_facts))
      fail("tensor ", i, " must be on flat's device (expected ", device_name(flat_facts), ", got ", device_name(facts),
           ")");
    Part& part = fusion.parts[i];
    part.data = facts.data;
    part.flat_offset = offset;
    part.numel = facts.numel;
    part.kind = kind_of(facts, "tensor ", i);
    offset += facts.numel;

    const int64_t* place_strides = places.is_given() ? places.next_strides(facts, i) : nullptr;
    if (facts.numel == 0) continue;
    if (place_strides != nullptr) {
      if (!is_dense(facts, place_strides))
        fail("layout: the place of tensor ", i, " must be dense (got sizes ", list(facts.sizes, facts.dim),
             " and strides ", list(place_strides, facts.dim), ")");
      plan_walk(facts, place_strides, &part);
    } else if (!is_row_major(facts) && !is_dense(facts, facts.strides)) {
      row_major_strides.resize(size_t(facts.dim));
      int64_t stride = 1;
      for (int64_t d = facts.dim - 1; d >= 0; stride *= facts.sizes[d--]) row_major_strides[size_t(d)] = stride;
      plan_walk(facts, row_major_strides.data(), &part);
    }
    if (!is_packing && overlaps_itself(part))
      fail("tensor ", i, " must not overlap itself, because it is written (got sizes ", list(facts.sizes, facts.dim),
           " and strides ", list(facts.strides, facts.dim), ")");
    if (lies_in_flat(part, fusion)) fail("tensor ", i, " and flat must not share memory");
  }
  places.expect_end();
  if (offset != flat_facts.numel)
    fail("tensors must fill flat (expected ", flat_facts.numel, " elements, got ", offset, " in ", tensors.size(),
         " tensors)");
  return fusion;
}

Accumulation check_accumulation(const Tensor& destination, const Tensor& source) {
  const Facts to = facts_of(destination, /*is_written=*/true);
  const Facts from = facts_of(source, /*is_written=*/false);
  if (!is_on_device_of(from, to))
    fail("source must be on destination's device (expected ", device_name(to), ", got ", device_name(from), ")");
  if (to.dim != from.dim || !std::equal(to.sizes, to.sizes + to.dim, from.sizes))
    fail("source must have destination's shape (expected ", list(to.sizes, to.dim), ", got ",
         list(from.sizes, from.dim), ")");
  bool has_same_order = to.numel == 0 || is_dense(to, to.strides);
  for (int64_t i = 0; i < to.dim && to.numel > 0; ++i)
    has_same_order = has_same_order && (to.sizes[i] == 1 || to.strides[i] == from.strides[i]);
  if (!has_same_order)
    fail("destination and source must be dense in the same order (got strides ", list(to.strides, to.dim), " and ",
         list(from.strides, from.dim), " of sizes ", list(to.sizes, to.dim), ")");
  return {to.data, from.data, to.numel, kind_of(to, "destination"), kind_of(from, "source")};
}

Encoding check_encoding(const Tensor& payload, const Tensor& values, const OptionalTensor& residual,
                        const OptionalTensor& next, int64_t format) {
  const float* const from = check_values(values);
  const BlockForm form = check_payload(payload, values, format);
  return {form,
          static_cast<uint8_t*>(payload.mutable_data_ptr()),
          from,
          check_residual("residual", residual, values),
          check_residual("next", next, values),
          values.numel()};
}

Decoding check_decoding(const Tensor& into, const Tensor& payload, int64_t format, bool adds) {
  check_values(into);
  const BlockForm form = check_payload(payload, into, format);
  return {form, static_cast<float*>(into.mutable_data_ptr()), static_cast<const uint8_t*>(payload.const_data_ptr()),
          into.numel(), adds};
}

Selection check_selection(const Tensor& places, const Tensor& found, const Tensor& values,
                          const OptionalTensor& residual, const OptionalTensor& next) {
  const float* const from = check_values(values);
  check_flat("places", places, ScalarType::Int, "int32");
  check_flat("found", found, ScalarType::Float, "float32");
  check_beside("found", found, found.numel(), values);
  check_beside("places", places, found.numel(), values);
  if (found.numel() > values.numel() || values.numel() > INT32_MAX)
    fail("found must hold no more than the values (expected at most ", values.numel(), ", got ", found.numel(), ")");
  return {static_cast<int32_t*>(places.mutable_data_ptr()),
          static_cast<float*>(found.mutable_data_ptr()),
          from,
          check_residual("residual", residual, values),
          check_residual("next", next, values),
          size_t(values.numel()),
          size_t(found.numel())};
}

}  // namespace psengine
