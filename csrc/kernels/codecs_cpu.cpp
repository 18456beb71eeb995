// The operators of codecs on the CPU: threads, and which values "topk" takes.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "kernels/checks.h"

namespace psengine {
namespace {

// Waking the other threads costs as much as this many values.
constexpr int64_t kParallelNumel = 128 * 1024;
constexpr int64_t kNumelPerThread = 64 * 1024;

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

void encode_blocks_(const Tensor& payload, const Tensor& values, const OptionalTensor& residual,
                    const OptionalTensor& next, int64_t format) {
  const Encoding e = check_encoding(payload, values, residual, next, format);
  each_run(e.numel, e.form.numel, [&](int64_t first, int64_t count) {
    kernels().encode_blocks(e.form.format, e.payload + first / e.form.numel * e.form.bytes, e.values + first,
                            e.residual == nullptr ? nullptr : e.residual + first,
                            e.next == nullptr ? nullptr : e.next + first, size_t(count));
    if (e.next != nullptr) finish_streaming();
  });
}

void decode_blocks_(const Tensor& into, const Tensor& payload, int64_t format, bool adds) {
  const Decoding d = check_decoding(into, payload, format, adds);
  each_run(d.numel, d.form.numel, [&](int64_t first, int64_t count) {
    kernels().decode_blocks(d.form.format, d.into + first, d.payload + first / d.form.numel * d.form.bytes,
                            size_t(count), adds);
  });
}

// ---- topk

// A magnitude as the bits of a float32, which have its order. All NaNs are alike, above infinity.
constexpr uint32_t kNan = 0x7f800001;

uint32_t magnitude_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return std::min(bits & 0x7fffffff, kNan);
}

// The bits of the magnitude that is number `rank` of all of them, 0 being the largest; reorders `magnitudes`.
uint32_t nth_largest(std::vector<uint32_t>* magnitudes, size_t rank) {
  std::nth_element(magnitudes->begin(), magnitudes->begin() + ptrdiff_t(rank), magnitudes->end(),
                   std::greater<uint32_t>());
  return (*magnitudes)[rank];
}

// What an encode_largest_ reads: values[i] + residual[i].
struct Corrected {
  const float* values;
  const float* residual;  // or null
  size_t numel;

  float operator[](size_t i) const { return residual == nullptr ? values[i] : values[i] + residual[i]; }
};

// A magnitude that somewhat more than `wanted` values reach, judged by a sample; never 0, which all would reach.
uint32_t sampled_threshold(const Corrected& corrected, size_t wanted) {
  constexpr size_t kSample = 4096;
  const size_t numel = corrected.numel, size = std::min(numel, kSample);
  std::vector<uint32_t> sample(size);
  for (size_t i = 0; i < size; ++i) {
    // A stride would meet the same column of a matrix again and again.
    const size_t place = size == numel ? i : (i * 2654435761u + i * (numel / size)) % numel;
    sample[i] = magnitude_bits(corrected[place]);
  }
  const double expected = double(wanted) / double(numel) * double(size);
  return std::max(1u, nth_largest(&sample, std::min(size - 1, size_t(expected * 1.25 + 12.0))));
}

// nth_largest of all, whatever they are: their upper halves are counted, then the lower halves of those that matter.
uint32_t nth_largest_of_all(const Corrected& corrected, size_t rank) {
  std::vector<size_t> counts(1 << 16);
  const auto find = [&] {
    uint32_t half = 0xffff;
    for (; rank >= counts[half]; --half) rank -= counts[half];
    return half;
  };
  for (size_t i = 0; i < corrected.numel; ++i) ++counts[magnitude_bits(corrected[i]) >> 16];
  const uint32_t upper = find();
  std::fill(counts.begin(), counts.end(), 0);
  for (size_t i = 0; i < corrected.numel; ++i) {
    const uint32_t bits = magnitude_bits(corrected[i]);
    if (bits >> 16 == upper) ++counts[bits & 0xffff];
  }
  return upper << 16 | find();
}

// Where the places and values that were chosen are written, ascending.
struct Chosen {
  int32_t* places;
  float* found;
  float* kept;  // or null: what is chosen is not left out
  size_t count = 0;

  void add(size_t place, float value) {
    places[count] = int32_t(place);
    found[count++] = value;
    if (kept != nullptr) kept[place] = 0.0f;
  }
};

// Chooses among candidates that have all of the largest, and more.
void choose_among(const uint32_t* places, const float* values, size_t count, size_t wanted, Chosen* chosen) {
  std::vector<uint32_t> magnitudes(count);
  for (size_t i = 0; i < count; ++i) magnitudes[i] = magnitude_bits(values[i]);
  const uint32_t smallest = nth_largest(&magnitudes, wanted - 1);
  // nth_element: those before it are not smaller.
  size_t ties = 0;
  for (size_t i = 0; i < wanted; ++i) ties += magnitudes[i] == smallest;
  for (size_t i = 0; i < count && chosen->count < wanted; ++i) {
    const uint32_t magnitude = magnitude_bits(values[i]);
    if (magnitude < smallest || (magnitude == smallest && ties == 0)) continue;
    ties -= magnitude == smallest;
    chosen->add(places[i], values[i]);
  }
}

// Without candidates, because the sample misled, or residual and `kept` are the same memory.
void choose_among_all(const Corrected& corrected, size_t wanted, Chosen* chosen) {
  const uint32_t smallest = nth_largest_of_all(corrected, wanted - 1);
  size_t larger = 0;
  for (size_t i = 0; i < corrected.numel; ++i) larger += magnitude_bits(corrected[i]) > smallest;
  size_t ties = wanted - larger;
  for (size_t i = 0; i < corrected.numel; ++i) {
    const float value = corrected[i];
    const uint32_t magnitude = magnitude_bits(value);
    if (chosen->kept != nullptr) chosen->kept[i] = magnitude < 0x7f800000 ? value : 0.0f;
    if (magnitude < smallest || (magnitude == smallest && ties == 0)) continue;
    ties -= magnitude == smallest;
    chosen->add(i, value);
  }
}

void encode_largest_(const Tensor& places, const Tensor& found, const Tensor& values, const OptionalTensor& residual,
                     const OptionalTensor& next) {
  const Selection selection = check_selection(places, found, values, residual, next);
  const size_t numel = selection.numel, wanted = selection.wanted;
  if (wanted == 0) return;
  const Corrected corrected{selection.values, selection.residual, numel};
  Chosen chosen{selection.places, selection.found, selection.next};
  // A second attempt would add the residual twice.
  if (corrected.residual != nullptr && corrected.residual == chosen.kept)
    return choose_among_all(corrected, wanted, &chosen);
  // The last part is for the spread of a sample that has few of the largest.
  const size_t capacity = std::min(numel, 4 * wanted + 4096 + numel / 64);
  std::unique_ptr<uint32_t[]> candidate_places(new uint32_t[capacity]);
  std::unique_ptr<float[]> candidates(new float[capacity]);
  const size_t count = kernels().collect_large(corrected.values, corrected.residual, chosen.kept, numel,
                                               sampled_threshold(corrected, wanted), candidate_places.get(),
                                               candidates.get(), capacity);
  if (wanted <= count && count <= capacity)
    return choose_among(candidate_places.get(), candidates.get(), count, wanted, &chosen);
  choose_among_all(corrected, wanted, &chosen);
}

STABLE_TORCH_LIBRARY_IMPL(psengine, CPU, m) {
  m.impl("encode_blocks_", TORCH_BOX(&encode_blocks_));
  m.impl("decode_blocks_", TORCH_BOX(&decode_blocks_));
  m.impl("encode_largest_", TORCH_BOX(&encode_largest_));
}

}  // namespace
}  // namespace psengine
