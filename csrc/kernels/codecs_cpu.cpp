// The operators of codecs on the CPU: checks, threads, and which values "topk" takes.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "kernels/codecs.h"

namespace psengine {
namespace {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// Waking the other threads costs as much as this many values.
constexpr int64_t kParallelNumel = 128 * 1024;
constexpr int64_t kNumelPerThread = 64 * 1024;

const float* floats_of(const Optional& tensor) {
  return tensor.has_value() ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

float* floats_of_mutable(const Optional& tensor) {
  return tensor.has_value() ? static_cast<float*>(tensor->mutable_data_ptr()) : nullptr;
}

// Calls visit(first element, number of elements) for runs of whole blocks, from several threads where there are many.
template <class Visit>
void each_run(int64_t numel, int64_t block_numel, const Visit& visit) {
  if (numel < kParallelNumel || torch::stable::get_num_threads() == 1) {
    if (numel > 0) visit(0, numel);
    return;
  }
  const int64_t blocks = (numel + block_numel - 1) / block_numel;
  torch::stable::parallel_for(0, blocks, kNumelPerThread / block_numel, [&](int64_t begin, int64_t end) {
    visit(begin * block_numel, std::min(end * block_numel, numel) - begin * block_numel);
  });
}

void encode_blocks_(const Tensor& payload, const Tensor& values, const Optional& residual, const Optional& next,
                    int64_t number) {
  const BlockForm form = check_blocks(payload, values, number);
  check_residual("residual", residual, values);
  check_residual("next", next, values);
  uint8_t* const bytes = static_cast<uint8_t*>(payload.mutable_data_ptr());
  const float* const from = static_cast<const float*>(values.const_data_ptr());
  const float* const left = floats_of(residual);
  float* const kept = floats_of_mutable(next);
  each_run(values.numel(), form.numel, [&](int64_t first, int64_t count) {
    kernels().encode_blocks(form.format, bytes + first / form.numel * form.bytes, from + first,
                            left == nullptr ? nullptr : left + first, kept == nullptr ? nullptr : kept + first,
                            size_t(count));
  });
}

void decode_blocks_(const Tensor& into, const Tensor& payload, int64_t number, bool adds) {
  const BlockForm form = check_blocks(payload, into, number);
  const uint8_t* const bytes = static_cast<const uint8_t*>(payload.const_data_ptr());
  float* const to = static_cast<float*>(into.mutable_data_ptr());
  each_run(into.numel(), form.numel, [&](int64_t first, int64_t count) {
    kernels().decode_blocks(form.format, to + first, bytes + first / form.numel * form.bytes, size_t(count), adds);
  });
}

// ---- topk

uint32_t magnitude_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffff;
}

// The bits of the magnitude that is number `rank` of all of them, 0 being the largest; reorders `magnitudes`.
uint32_t nth_largest(std::vector<uint32_t>* magnitudes, size_t rank) {
  std::nth_element(magnitudes->begin(), magnitudes->begin() + ptrdiff_t(rank), magnitudes->end(),
                   std::greater<uint32_t>());
  return (*magnitudes)[rank];
}

// A magnitude that somewhat more than `wanted` values reach, judged by a sample.
uint32_t sampled_threshold(const float* values, const float* residual, size_t numel, size_t wanted) {
  constexpr size_t kSample = 4096;
  const size_t size = std::min(numel, kSample);
  std::vector<uint32_t> sample(size);
  for (size_t i = 0; i < size; ++i) {
    // A stride would meet the same column of a matrix again and again.
    const size_t place = size == numel ? i : (i * 2654435761u + i * (numel / size)) % numel;
    sample[i] = magnitude_bits(residual == nullptr ? values[place] : values[place] + residual[place]);
  }
  const double expected = double(wanted) / double(numel) * double(size);
  return nth_largest(&sample, std::min(size - 1, size_t(expected * 1.25 + 12.0)));
}

void encode_largest_(const Tensor& places, const Tensor& found, const Tensor& values, const Optional& residual,
                     const Optional& next) {
  check_floats("values", values);
  check_floats("found", found);
  check_places(places, found, values);
  check_residual("residual", residual, values);
  check_residual("next", next, values);
  const size_t numel = size_t(values.numel()), wanted = size_t(found.numel());
  if (wanted == 0) return;
  const float* const from = static_cast<const float*>(values.const_data_ptr());
  const float* const left = floats_of(residual);
  // Where they are the same memory, a second attempt would add the residual twice.
  const bool is_same = left != nullptr && next.has_value() && left == next->const_data_ptr();
  float* const kept = floats_of_mutable(next);

  const size_t capacity = std::min(numel, 4 * wanted + 4096);
  std::unique_ptr<uint32_t[]> candidate_places(new uint32_t[capacity]);
  std::unique_ptr<float[]> candidates(new float[capacity]);
  size_t count = 0;
  if (!is_same) {
    const uint32_t threshold = sampled_threshold(from, left, numel, wanted);
    count = kernels().collect_large(from, left, kept, numel, threshold, candidate_places.get(), candidates.get(),
                                    capacity);
  }
  if (count < wanted || count > capacity) {  // the sample misled: the threshold itself, from all values
    std::vector<uint32_t> magnitudes(numel);
    for (size_t i = 0; i < numel; ++i)
      magnitudes[i] = magnitude_bits(left == nullptr ? from[i] : from[i] + left[i]);
    const uint32_t threshold = nth_largest(&magnitudes, wanted - 1);
    candidate_places.reset(new uint32_t[numel]);  // all may be equal
    candidates.reset(new float[numel]);
    count = kernels().collect_large(from, left, kept, numel, threshold, candidate_places.get(), candidates.get(), numel);
  }

  std::vector<uint32_t> magnitudes(count);
  for (size_t i = 0; i < count; ++i) magnitudes[i] = magnitude_bits(candidates[i]);
  const uint32_t smallest = nth_largest(&magnitudes, wanted - 1);
  // nth_element: those before it are not smaller.
  size_t ties = 0;
  for (size_t i = 0; i < wanted; ++i) ties += magnitudes[i] == smallest;
  int32_t* const to_places = static_cast<int32_t*>(places.mutable_data_ptr());
  float* const to_found = static_cast<float*>(found.mutable_data_ptr());
  size_t taken = 0;
  for (size_t i = 0; i < count && taken < wanted; ++i) {
    const uint32_t magnitude = magnitude_bits(candidates[i]);
    if (magnitude < smallest || (magnitude == smallest && ties == 0)) continue;
    ties -= magnitude == smallest;
    to_places[taken] = int32_t(candidate_places[i]);
    to_found[taken++] = candidates[i];
    if (kept != nullptr) kept[candidate_places[i]] = 0.0f;
  }
}

STABLE_TORCH_LIBRARY_IMPL(psengine, CPU, m) {
  m.impl("encode_blocks_", TORCH_BOX(&encode_blocks_));
  m.impl("decode_blocks_", TORCH_BOX(&decode_blocks_));
  m.impl("encode_largest_", TORCH_BOX(&encode_largest_));
}

}  // namespace
}  // namespace psengine
