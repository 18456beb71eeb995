// Runs the CUDA kernels on the host, and compares every bit with the CPU's kernels (but which NaN a NaN is).
//
// Prints the number of comparisons, or what differed, and then fails.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda.h"

namespace psengine {


namespace {

const Kernels& cpu = baseline_kernels;
std::mt19937 generator(27);
int64_t comparisons = 0;

const ScalarKind kKinds[] = {ScalarKind::float32, ScalarKind::float64, ScalarKind::float16, ScalarKind::bfloat16};
const char* const kNames[] = {"float32", "float64", "float16", "bfloat16"};

// Memory of exactly this size, which begins `lead` elements behind a place that is aligned for everything.
class Memory {
 public:
  Memory(ScalarKind kind, int64_t numel, int64_t lead)
      : kind_(kind), bytes_(size_t(numel) * element_bytes(kind)), lead_bytes_(size_t(lead) * element_bytes(kind)),
        held_(static_cast<char*>(std::malloc(lead_bytes_ + bytes_))) {
    for (size_t i = 0; i < lead_bytes_ + bytes_; ++i) held_[i] = char(0x5a);
  }
  Memory(const Memory& other) : Memory(other.kind_, other.numel(), int64_t(other.lead_bytes_ / element_bytes(other.kind_))) {
    std::memcpy(held_, other.held_, lead_bytes_ + bytes_);
  }
  ~Memory() { std::free(held_); }

  char* data() const { return held_ + lead_bytes_; }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  int64_t numel() const { return int64_t(bytes_ / element_bytes(kind_)); }

  // Many magnitudes, some of which overflow or vanish in 16 bits, and what is not finite.
  Memory& fill(bool with_non_finite = true) {
    std::vector<double> values(size_t(numel()) + 1);  // never null
    for (double& value : values) {
      const uint32_t chance = uint32_t(generator());
      value = std::ldexp(double(int32_t(generator())), int(chance % 64) - 63);
      if (chance % 31 == 0) value = std::ldexp(double(chance % 4096), -149);  // subnormal
      if (chance % 37 == 0) value = std::ldexp(double(chance % 64) / 4, 0);   // ties, and zeros of both signs
      if (chance % 74 == 0) value = -value;
      if (!with_non_finite) continue;
      if (chance % 997 == 0) value = std::numeric_limits<double>::infinity();
      if (chance % 1009 == 0) value = -std::numeric_limits<double>::infinity();
      if (chance % 1013 == 0) value = std::numeric_limits<double>::quiet_NaN();
    }
    cpu.convert(data(), kind_, values.data(), ScalarKind::float64, size_t(numel()), 1.0, nullptr);
    return *this;
  }

  // Whether the bits are the other's, and in front of the values nothing was written.
  void expect(const Memory& expected, const std::string& what) const {
    comparisons += 1;
    if (std::memcmp(held_, expected.held_, lead_bytes_ + bytes_) == 0) return;
    const size_t width = element_bytes(kind_);
    for (size_t at = 0; at < lead_bytes_ + bytes_; at += width) {
      if (std::memcmp(held_ + at, expected.held_ + at, width) == 0) continue;
      if (at >= lead_bytes_ && is_nan(held_ + at) && is_nan(expected.held_ + at)) continue;
      std::fprintf(stderr, "%s: element %lld differs\n", what.c_str(),
                   (long long)((int64_t(at) - int64_t(lead_bytes_)) / int64_t(width)));
      std::exit(1);
    }
  }

 private:
  bool is_nan(const char* element) const {
    double value = 0;
    cpu.convert(&value, ScalarKind::float64, element, kind_, 1, 1.0, nullptr);
    return std::isnan(value);
  }

  ScalarKind kind_;
  size_t bytes_, lead_bytes_;
  char* held_;
};

// ---- many tensors and a flat one

struct Layout {
  std::vector<int64_t> sizes, strides;  // as in Part

  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
  int64_t span() const {  // elements from the first to behind the last
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
    return last + 1;
  }
  int64_t offset(int64_t position) const {
    int64_t offset = 0;
    for (size_t d = sizes.size(); d-- > 0; position /= sizes[d]) offset += position % sizes[d] * strides[d];
    return offset;
  }
};

// Packs tensors of these layouts (no strides: one run of memory), and unpacks them. Tensor i begins i % lead_cycle
// elements into its memory.
void try_fusion(ScalarKind flat_kind, ScalarKind kind, const std::vector<Layout>& layouts, int64_t flat_lead,
                int64_t lead_cycle, double scale, bool is_counting = true) {
  const std::string what = std::string(kNames[int(flat_kind)]) + " flat, " + kNames[int(kind)] + ", lead " +
                           std::to_string(flat_lead) + ", " + std::to_string(layouts.size()) + " tensors";
  Fusion fusion{nullptr, 0, flat_kind, {}};
  std::vector<Memory> tensors;
  tensors.reserve(layouts.size());
  for (const Layout& layout : layouts) {
    const bool is_run = layout.strides.empty();
    tensors.emplace_back(kind, is_run ? layout.numel() : layout.span(), int64_t(tensors.size()) % lead_cycle);
    tensors.back().fill();
    fusion.parts.push_back({tensors.back().data(), fusion.flat_numel, layout.numel(), kind,
                            is_run ? std::vector<int64_t>() : layout.sizes, layout.strides});
    fusion.flat_numel += layout.numel();
  }
  const size_t width = element_bytes(kind), flat_width = element_bytes(flat_kind);
  Memory expected(flat_kind, fusion.flat_numel, flat_lead);
  std::vector<int64_t> expected_counts;
  std::vector<char> run;
  for (size_t i = 0; i < layouts.size(); ++i) {
    const Part& part = fusion.parts[i];
    run.resize(size_t(part.numel) * width + 1);  // never null
    for (int64_t k = 0; k < part.numel; ++k)
      std::memcpy(&run[size_t(k) * width], part.data + (part.sizes.empty() ? k : layouts[i].offset(k)) * int64_t(width),
                  width);
    int64_t count = 0;
    cpu.convert(expected.data() + part.flat_offset * int64_t(flat_width), flat_kind, run.data(), kind,
                size_t(part.numel), scale, &count);
    expected_counts.push_back(count);
  }
  Memory packed(flat_kind, fusion.flat_numel, flat_lead);
  fusion.flat = packed.data();
  std::vector<int64_t> partial(size_t(chunk_count(fusion)), -1), counts(layouts.size(), -1);
  write_fusion(fusion, Direction::pack, scale, partial.data(), is_counting ? counts.data() : nullptr, nullptr);
  packed.expect(expected, what + ", pack");
  if (is_counting && !counts.empty() && counts != expected_counts) {
    std::fprintf(stderr, "%s: counts differ\n", what.c_str());
    std::exit(1);
  }
  Memory flat(flat_kind, fusion.flat_numel, flat_lead);
  fusion.flat = flat.fill().data();
  std::vector<Memory> targets(tensors);
  for (size_t i = 0; i < layouts.size(); ++i) {
    Part& part = fusion.parts[i];
    part.data = targets[i].data();
    run.resize(size_t(part.numel) * width + 1);  // never null
    cpu.convert(run.data(), kind, fusion.place_of(part), flat_kind, size_t(part.numel), scale, nullptr);
    for (int64_t k = 0; k < part.numel; ++k)
      std::memcpy(tensors[i].data() + (part.sizes.empty() ? k : layouts[i].offset(k)) * int64_t(width),
                  &run[size_t(k) * width], width);
  }
  write_fusion(fusion, Direction::unpack, scale, nullptr, nullptr, nullptr);
  for (size_t i = 0; i < layouts.size(); ++i) targets[i].expect(tensors[i], what + ", unpack " + std::to_string(i));
}

std::vector<Layout> runs(const std::vector<int64_t>& numels) {
  std::vector<Layout> layouts;
  for (const int64_t numel : numels) layouts.push_back({{numel}, {}});
  return layouts;
}

void try_fusions() {
  // Around packs (2 to 8 elements), warps, and chunks (2,048, 4,096 and 8,192 elements).
  const std::vector<Layout> around = runs({0, 1, 31, 32, 33, 255, 2047, 0, 2049, 4097, 8193, 7});
  const std::vector<Layout> strided = {
      {{33}, {}}, {{60, 7}, {7, 61 * 7}}, {{5, 3, 9}, {31, 100, 2}}, {{4200}, {3}}, {{0}, {}}, {{3, 3001}, {1, 5}},
      {{2, 2, 3, 2, 2, 3, 2, 5}, {5000, 2500, 700, 300, 140, 40, 16, 2}}};
  for (const ScalarKind flat_kind : kKinds) {
    for (const ScalarKind kind : kKinds) {
      for (const int64_t flat_lead : {0, 1, 7})
        try_fusion(flat_kind, kind, around, flat_lead, 4, 1.0 / 3, /*is_counting=*/flat_lead == 7);
      try_fusion(flat_kind, kind, around, 0, 1, 1.0, /*is_counting=*/false);
      try_fusion(flat_kind, kind, strided, 3, 2, 1.0 / 3);
    }
  }
  for (const int64_t count : {0, 126, 127, 1021, 1022}) {  // one launch takes 126 or 1,021
    std::vector<int64_t> numels;
    for (int64_t i = 0; i < count; ++i) numels.push_back(i * 37 % 41);
    try_fusion(ScalarKind::float32, ScalarKind::bfloat16, runs(numels), 1, 3, 1.0 / 3);
  }
  std::vector<Layout> many(45, strided[1]);  // one launch takes 22
  try_fusion(ScalarKind::bfloat16, ScalarKind::float32, many, 0, 3, 1.0 / 3);
}

void try_accumulations() {
  for (const ScalarKind kind : kKinds) {
    for (const ScalarKind source_kind : kKinds) {
      for (const int64_t numel : {0, 1, 31, 33, 4096, 9001}) {
        for (const int64_t lead : {0, 1, 3}) {
          Memory source(source_kind, numel, lead), expected(kind, numel, numel % 2 == 0 ? lead : 0);
          source.fill();
          Memory actual(expected.fill());
          cpu.accumulate(expected.data(), kind, source.data(), source_kind, size_t(numel), 1.0 / 3);
          accumulate({actual.data(), source.data(), numel, kind, source_kind}, 1.0 / 3, nullptr);
          actual.expect(expected, std::string("accumulate ") + kNames[int(source_kind)] + " to " + kNames[int(kind)]);
        }
      }
    }
  }
}

// ---- codecs

// What codes end at: the largest value that counts as finite and the next one; the smallest that int8 has a scale for
// and the one before; 6 in E2M1 and the next one.
const float kEdges[] = {0x1.8p127f, 0x1.800002p127f, 127 * 0x1p-126f, 0x1.fbfffep-120f, 6.0f, 0x1.800002p2f};

// Blocks of zeros, of subnormal and of overflowing values, too, and of values up to an edge.
Memory block_values(int64_t numel, bool with_non_finite, float edge) {
  Memory memory(ScalarKind::float32, numel, numel % 3);
  memory.fill(with_non_finite);
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t block = i / 512 % 5;
    float& value = memory.floats()[i];
    value *= block == 1 ? 0.0f : block == 2 ? 1e-38f : block == 3 ? 1e38f : 1.0f;
    if (block == 4) value = i % 32 == 0 ? edge : edge * (float(generator() % 2048) / 1024 - 1);
  }
  return memory;
}

void try_codec(const BlockForm& form, int64_t numel, int64_t lead, bool with_non_finite, float edge = 1.0f) {
  const std::string what = "format " + std::to_string(int(form.format)) + ", " + std::to_string(numel) + " values";
  const int64_t payload_bytes = (numel + form.numel - 1) / form.numel * form.bytes;
  std::vector<uint8_t> payload(size_t(lead + payload_bytes), 7), expected_payload(payload);
  const Memory values = block_values(numel, with_non_finite, edge);
  const Memory residual = block_values(numel, with_non_finite, edge);
  for (const bool has_residual : {false, true}) {
    for (const bool keeps : {false, true}) {
      for (const bool in_place : {false, true}) {
        Memory next(residual), expected_next(residual);
        if (in_place && (!has_residual || !keeps)) continue;
        const auto residual_of = [&](const Memory& kept) {
          return !has_residual ? nullptr : in_place ? kept.floats() : residual.floats();
        };
        cpu.encode_blocks(form.format, expected_payload.data() + lead, values.floats(), residual_of(expected_next),
                          keeps ? expected_next.floats() : nullptr, size_t(numel));
        encode_blocks({form, payload.data() + lead, values.floats(), residual_of(next),
                       keeps ? next.floats() : nullptr, numel}, nullptr);
        next.expect(expected_next, what + ", residual");
        comparisons += 1;
        if (payload == expected_payload) continue;
        std::fprintf(stderr, "%s: payloads differ\n", what.c_str());
        std::exit(1);
      }
    }
  }
  for (const bool is_random : {false, true}) {
    if (is_random)
      for (uint8_t& byte : payload) byte = uint8_t(generator());
    for (const bool adds : {false, true}) {
      Memory into(values), expected(values);
      cpu.decode_blocks(form.format, expected.floats(), payload.data() + lead, size_t(numel), adds);
      decode_blocks({form, into.floats(), payload.data() + lead, numel, adds}, nullptr);
      into.expect(expected, what + ", decoded");
    }
  }
}

void try_codecs() {
  for (const BlockForm& form : {BlockForm{BlockFormat::int8, 256, 260}, BlockForm{BlockFormat::fp4, 32, 17},
                                BlockForm{BlockFormat::onebit, 512, 68}}) {
    for (const int64_t numel : {0, 1, 31, 32, 33, 255, 256, 257, 511, 512, 513, 3000}) {
      try_codec(form, numel, numel % 4, /*with_non_finite=*/false);
      try_codec(form, numel, 1, /*with_non_finite=*/true);
    }
    for (const float edge : kEdges) try_codec(form, 2560, 2, /*with_non_finite=*/false, edge);
  }
}

}  // namespace
}  // namespace psengine

int main() {
  psengine::try_fusions();
  psengine::try_accumulations();
  psengine::try_codecs();
  std::printf("%lld comparisons\n", static_cast<long long>(psengine::comparisons));
}
