// In which order the values of the ranks are added.
//
// gloo's all-reduce, and with it native DDP, cuts a tensor into a chunk a rank and adds those of chunk c as
//
//   (((x[c-1] + x[c-2]) + x[c-3]) + ...) + x[c]      ranks modulo the world size
//
// tests/oracles/ring_order.py has the whole rule, with the same names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace psengine {

// Known to psengine/collectives/shared_memory/host.py.
enum class Order : uint32_t { ring = 0, rank = 1 };

constexpr uint64_t kMaxSegmentBytes = 1024 * 1024;

// Elements of a chunk of a tensor of `numel`; the last chunks end with the tensor.
inline uint64_t ring_chunk_numel(uint64_t numel, size_t element_bytes, size_t world_size) {
  auto round_up = [](uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; };
  const uint64_t bytes = numel * element_bytes;
  const uint64_t max_segment = element_bytes * std::max<uint64_t>(1, kMaxSegmentBytes / element_bytes);
  const uint64_t segments =
      round_up(std::max<uint64_t>((bytes + max_segment - 1) / max_segment, 2 * world_size), world_size);
  const uint64_t segment_bytes = round_up(std::max<uint64_t>(1, (bytes + segments - 1) / segments), element_bytes);
  return segments / world_size * (segment_bytes / element_bytes);
}

// The rank whose values are added as number `step` in `chunk`.
inline size_t ring_rank(uint64_t chunk, size_t step, size_t world_size) {
  return (chunk + 2 * world_size - 1 - step) % world_size;
}

}  // namespace psengine
