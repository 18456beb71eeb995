// An operation under way on one rank, and how it is cut into rounds and chunks.
#pragma once

#include <algorithm>

#include "shared_memory/layout.h"

namespace psengine {

struct SharedMemoryGroup::Call {
  Operation operation;
  ScalarKind kind = ScalarKind::float32;
  uint64_t numel = 0;       // elements (bytes where nothing is computed) of this rank's input
  size_t element_bytes = 1;
  double scale = 1.0;
  uint32_t source_rank = 0;
  const char* input = nullptr;
  char* output = nullptr;
  bool is_staged = true;
  bool is_summed_by_all = false;  // small: no chunks
  uint32_t segment_slot = 0;
  const char* segment = nullptr;  // where the tensor's own segment begins, if it is not staged
  uint64_t first_round = 0;
  uint64_t rounds = 1;
  uint64_t numel_per_round = 0;
  const Contribution* contributions = nullptr;  // what is added, where it is not a tensor of each rank
  size_t addends = 0;
  uint64_t owners = 0;
  uint64_t whole_numel = 0;  // of the tensor that the ranks add, of which reduce_scatter keeps a part
  uint64_t ring_numel = 0;   // of a chunk of gloo's ring in it; 0: values are added in the order of ranks

  bool has_chunks() const {
    return (operation == Operation::all_reduce && !is_summed_by_all) || operation == Operation::sum_contributions;
  }
  // Of the memory that an operation in place uses of `rank`.
  uint64_t bytes_of(size_t rank) const {
    uint64_t last_row = 0;
    for (size_t number = 0; contributions != nullptr && number < addends; ++number)
      if (contributions[number].rank == rank) last_row = std::max<uint64_t>(last_row, contributions[number].row);
    return (1 + last_row) * numel * element_bytes;
  }
  uint64_t begin_of(uint64_t round) const { return (round - first_round) * numel_per_round; }
  uint64_t numel_of(uint64_t round) const { return std::min(numel_per_round, numel - begin_of(round)); }
  uint64_t chunk_numel() const { return kChunkBytes / element_bytes; }
  uint64_t chunks(uint64_t round) const { return (numel_of(round) + chunk_numel() - 1) / chunk_numel(); }
};

// The ring's size is a power of two.
inline SharedMemoryGroup::Call& SharedMemoryGroup::call_at(uint64_t number) {
  return calls_[number & (calls_.size() - 1)];
}
inline const SharedMemoryGroup::Call& SharedMemoryGroup::call_at(uint64_t number) const {
  return calls_[number & (calls_.size() - 1)];
}

}  // namespace psengine
