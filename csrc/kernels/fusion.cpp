// The checks that every device's kernels share; see fusion.h.
#include "kernels/fusion.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

namespace psengine {
namespace {

using torch::stable::Tensor;

// Messages are thrown as they are: STD_TORCH_CHECK would put the source file in front. psengine/kernels/ops.py raises
// the same.
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

std::string device_name(const Facts& facts) {
  std::string name = facts.device_type == aoti_torch_device_type_cpu()    ? "cpu"
                     : facts.device_type == aoti_torch_device_type_cuda() ? "cuda"
                     : facts.device_type == aoti_torch_device_type_meta() ? "meta"
                                                                          : "type " + std::to_string(facts.device_type);
  if (facts.device_type != aoti_torch_device_type_cpu()) name += ":" + std::to_string(facts.device_index);
  return name;
}

std::string list(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// The dtypes' numbers are libtorch's to choose, so they are asked for: once a call.
struct KindTable {
  int32_t float32 = aoti_torch_dtype_float32();
  int32_t float64 = aoti_torch_dtype_float64();
  int32_t float16 = aoti_torch_dtype_float16();
  int32_t bfloat16 = aoti_torch_dtype_bfloat16();

  bool find(int32_t dtype, ScalarKind* kind) const {
    if (dtype == float32) {
      *kind = ScalarKind::float32;
    } else if (dtype == bfloat16) {
      *kind = ScalarKind::bfloat16;
    } else if (dtype == float16) {
      *kind = ScalarKind::float16;
    } else if (dtype == float64) {
      *kind = ScalarKind::float64;
    } else {
      return false;
    }
    return true;
  }

  // ops.py then turns to the reference, which covers every dtype.
  ScalarKind kind_of(int32_t dtype, const std::string& who) const {
    ScalarKind kind;
    if (!find(dtype, &kind)) fail(who, ": dtype is not covered (expected a 16-, 32- or 64-bit float)");
    return kind;
  }
};

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
  part->sizes.reserve(merged);
  part->strides.reserve(merged);
  for (int64_t i = 0; i < merged; ++i) {
    part->sizes.push_back(dimensions[i].size);
    part->strides.push_back(dimensions[i].stride);
  }
}

// The memory from a part's first element to behind its last.
struct Span {
  const char* begin;
  const char* end;
  size_t index;
};

Span span_of(const Part& part, size_t index) {
  int64_t last = part.numel - 1;
  if (!part.sizes.empty()) {
    last = 0;
    for (size_t i = 0; i < part.sizes.size(); ++i) last += (part.sizes[i] - 1) * part.strides[i];
  }
  return {part.data, part.data + (last + 1) * int64_t(element_bytes(part.kind)), index};
}

bool share_memory(const Span& a, const Span& b) { return a.begin < b.end && b.begin < a.end; }

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

std::string span_name(const Span& span) {
  std::ostringstream text;
  text << "[" << static_cast<const void*>(span.begin) << ", " << static_cast<const void*>(span.end) << ")";
  return text.str();
}

// Targets must not share memory. Strided ones are trusted: the columns of a matrix lie between each other's elements.
void check_targets_apart(const Fusion& fusion) {
  std::vector<Span> spans;
  spans.reserve(fusion.parts.size());
  for (size_t i = 0; i < fusion.parts.size(); ++i)
    if (fusion.parts[i].numel > 0 && fusion.parts[i].sizes.empty()) spans.push_back(span_of(fusion.parts[i], i));
  const auto by_begin = [](const Span& a, const Span& b) { return a.begin < b.begin; };
  if (!std::is_sorted(spans.begin(), spans.end(), by_begin)) std::sort(spans.begin(), spans.end(), by_begin);
  for (size_t i = 1; i < spans.size(); ++i) {
    if (!share_memory(spans[i - 1], spans[i])) continue;
    const Span& a = spans[i - 1].index < spans[i].index ? spans[i - 1] : spans[i];
    const Span& b = spans[i - 1].index < spans[i].index ? spans[i] : spans[i - 1];
    fail("tensor ", a.index, " and tensor ", b.index,
         " must not share memory, because both are written (got addresses ", span_name(a), " and ", span_name(b), ")");
  }
}

// Reads the numbers of ops.layout_of() in turn.
class LayoutReader {
 public:
  explicit LayoutReader(const std::optional<Tensor>& layout) {
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

}  // namespace

Fusion check_fusion(const Tensor& flat, const std::vector<Tensor>& tensors, const std::optional<Tensor>& layout,
                    Direction direction) {
  const KindTable kinds;
  const bool is_packing = direction == Direction::pack;
  const Facts flat_facts = facts_of(flat, is_packing);
  if (flat_facts.dim != 1 || !is_row_major(flat_facts))
    fail("flat must be contiguous and of one dimension (got sizes ", list(flat_facts.sizes, flat_facts.dim),
         " and strides ", list(flat_facts.strides, flat_facts.dim), ")");

  Fusion fusion;
  fusion.flat = flat_facts.data;
  fusion.flat_numel = flat_facts.numel;
  fusion.flat_kind = kinds.kind_of(flat_facts.dtype, "flat");
  fusion.parts.resize(tensors.size());
  LayoutReader places(layout);
  const Span flat_span{fusion.flat, fusion.flat + flat_facts.numel * int64_t(element_bytes(fusion.flat_kind)), 0};
  int64_t offset = 0;
  const Part* in_flat = nullptr;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Facts facts = facts_of(tensors[i], !is_packing);
    Part& part = fusion.parts[i];
    if (facts.device_type != flat_facts.device_type || facts.device_index != flat_facts.device_index)
      fail("tensor ", i, " must be on flat's device (expected ", device_name(flat_facts), ", got ", device_name(facts),
           ")");
    if (!kinds.find(facts.dtype, &part.kind)) kinds.kind_of(facts.dtype, "tensor " + std::to_string(i));
    part.data = facts.data;
    part.flat_offset = offset;
    part.numel = facts.numel;
    offset += facts.numel;

    const int64_t* place_strides = places.is_given() ? places.next_strides(facts, i) : nullptr;
    if (facts.numel == 0) continue;
    if (place_strides != nullptr) {
      if (!is_dense(facts, place_strides))
        fail("layout: the place of tensor ", i, " must be dense (got sizes ", list(facts.sizes, facts.dim),
             " and strides ", list(place_strides, facts.dim), ")");
      plan_walk(facts, place_strides, &part);
    } else if (!is_row_major(facts) && !is_dense(facts, facts.strides)) {
      std::vector<int64_t> row_major_strides(size_t(facts.dim));
      int64_t stride = 1;
      for (int64_t d = facts.dim - 1; d >= 0; stride *= facts.sizes[d--]) row_major_strides[size_t(d)] = stride;
      plan_walk(facts, row_major_strides.data(), &part);
    }
    if (!is_packing && overlaps_itself(part))
      fail("tensor ", i, " must not overlap itself, because it is written (got sizes ", list(facts.sizes, facts.dim),
           " and strides ", list(facts.strides, facts.dim), ")");
    if (in_flat == nullptr && share_memory(span_of(part, i), flat_span)) in_flat = &part;
  }
  places.expect_end();
  if (offset != flat_facts.numel)
    fail("tensors must fill flat (expected ", flat_facts.numel, " elements, got ", offset, " in ", tensors.size(),
         " tensors)");
  if (in_flat != nullptr) {
    const size_t index = size_t(in_flat - fusion.parts.data());
    fail("tensor ", index, " and flat must not share memory, because ", is_packing ? "flat" : "the tensor",
         " is written (got addresses ", span_name(span_of(*in_flat, index)), " and ", span_name(flat_span), ")");
  }
  if (!is_packing) check_targets_apart(fusion);
  return fusion;
}

Accumulation check_accumulation(const Tensor& destination, const Tensor& source) {
  const KindTable kinds;
  const Facts to = facts_of(destination, /*is_written=*/true);
  const Facts from = facts_of(source, /*is_written=*/false);
  if (to.device_type != from.device_type || to.device_index != from.device_index)
    fail("source must be on destination's device (expected ", device_name(to), ", got ", device_name(from), ")");
  Accumulation accumulation{to.data, from.data, to.numel, kinds.kind_of(to.dtype, "destination"),
                            kinds.kind_of(from.dtype, "source")};
  if (to.dim != from.dim || !std::equal(to.sizes, to.sizes + to.dim, from.sizes))
    fail("source must have destination's shape (expected ", list(to.sizes, to.dim), ", got ",
         list(from.sizes, from.dim), ")");
  if (to.numel == 0) return accumulation;
  bool has_same_order = is_dense(to, to.strides);
  for (int64_t i = 0; i < to.dim; ++i)
    has_same_order = has_same_order && (to.sizes[i] == 1 || to.strides[i] == from.strides[i]);
  if (!has_same_order)
    fail("destination and source must be dense in the same order (got strides ", list(to.strides, to.dim), " and ",
         list(from.strides, from.dim), " of sizes ", list(to.sizes, to.dim), ")");
  const auto span = [&](const char* data, ScalarKind kind) {
    return Span{data, data + to.numel * int64_t(element_bytes(kind)), 0};
  };
  const Span to_span = span(to.data, accumulation.destination_kind);
  const Span from_span = span(from.data, accumulation.source_kind);
  if (share_memory(to_span, from_span))
    fail("destination and source must not share memory (got addresses ", span_name(to_span), " and ",
         span_name(from_span), ")");
  return accumulation;
}

}  // namespace psengine
