// The rows of one part of a table, found by id. One thread at a time may use it.
//
// A row that was never pushed is absent: its values are computed from the table's seed and the row's id. Every function
// throws std::invalid_argument for a negative id, before it changes anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "tables/hash.h"

namespace psengine {

// The order is known to psengine/kernels/row_table.py. State of a row: none; a sum for each element; one sum.
enum class RowOptimizer : int32_t { sgd = 0, adagrad = 1, rowwise_adagrad = 2 };

// Replaces values by their square roots, as torch does: MKL's differ from the processor's in some elements.
using SquareRoots = void (*)(float* values, size_t numel);

class RowTable {
 public:
  RowTable(uint64_t dim, RowOptimizer optimizer, double epsilon, uint64_t seed, uint64_t number, double std,
           SquareRoots square_roots);

  uint64_t rows() { return slots_used_ - free_.size(); }
  uint64_t slots() { return slots_used_; }  // with those that are free again
  uint64_t size_bytes() { return slots_used_ * row_bytes_ + index_.size() * sizeof(uint64_t); }

  void gather(const int64_t* ids, uint64_t count, float* out);
  uint64_t count_absent(const int64_t* ids, uint64_t count);

  // Ids: ascending, none twice. Either all rows are stepped, or an exception says why none is.
  void step(const int64_t* ids, uint64_t count, const float* gradients, double learning_rate, uint64_t stamp);

  // Overwrite or insert; of an id that is there twice the last row counts.
  void store(const int64_t* ids, uint64_t count, const float* rows, const float* states, const int64_t* stamps);

  // Remove up to `count` rows: those of the lowest stamps, among equals of the lowest ids, but none of `keep`, which is
  // ascending. Writes their ids and returns how many these are.
  uint64_t evict(uint64_t count, const int64_t* keep, uint64_t keep_count, int64_t* evicted);

  // The rows in slots [begin, end) whose stamps are not lower: writes them, unless `ids` is null, and returns how many.
  uint64_t read(uint64_t begin, uint64_t end, uint64_t least_stamp, int64_t* ids, float* rows, float* states,
                int64_t* stamps);

 private:
  using Block = std::unique_ptr<char, void (*)(void*)>;
  struct Row {
    int64_t id;     // kNoRow: the slot is free
    int64_t stamp;  // of its last push
    float* values() { return reinterpret_cast<float*>(this + 1); }  // and behind them the state
  };

  Row& at(uint32_t slot) const {
    const size_t place = slot & ((size_t(1) << block_bits_) - 1);
    return *reinterpret_cast<Row*>(blocks_[slot >> block_bits_].get() + place * row_bytes_);
  }

  uint32_t tag_of(int64_t id) const { return uint32_t(siphash(hash_key_, uint64_t(id)) >> 32); }
  size_t home_of(uint64_t tag) const { return tag >> (32 - index_bits_); }
  size_t after(size_t place) const { return (place + 1) & (index_.size() - 1); }
  size_t place_of(uint32_t tag, int64_t id) const;

  void add_block();
  void enlarge_index(unsigned bits);
  void reserve(size_t count);
  void find(const int64_t* ids, size_t count);
  void find_or_insert(const int64_t* ids, size_t count);
  void erase(uint32_t slot);
  void draw(int64_t id, float* values) const;
  void fetch(size_t i, size_t count) const;
  void find_oldest(size_t count);

  const size_t dim_, state_numel_, row_bytes_;
  const RowOptimizer optimizer_;
  const float epsilon_, scale_;
  const HashKey seed_, hash_key_;
  const SquareRoots square_roots_;

  // Blocks never move, so growth copies no rows. A row has a slot for as long as it lives.
  std::vector<Block> blocks_;
  unsigned block_bits_ = 0;  // slots of a block: 2^block_bits_
  size_t slots_used_ = 0;
  std::vector<uint32_t> free_;

  // Open addressing. An entry: upper half of the id's hash (tag), whose own upper bits say where it belongs (home), and
  // the row's slot plus 1; 0 where there is none. At most half of all places have one.
  std::vector<uint64_t> index_;
  unsigned index_bits_ = 0;

  std::vector<uint32_t> found_;  // slots of the call's rows
  std::vector<float> roots_;

  // Some rows that were pushed before all others, the oldest at the end. One that was pushed again is void.
  struct Pushed {
    int64_t stamp, id;
    uint32_t slot;
  };
  std::vector<Pushed> oldest_;
};

// Which of a table's parts has each row. `parts`: 1 to 2^32 - 1.
void find_parts(const int64_t* ids, uint64_t count, uint64_t parts, uint64_t seed, int64_t* out);

struct RowRun {
  const int64_t* ids;
  uint64_t count;
  const float* rows;
};

// Each run's ids: ascending, none twice. Writes the ids of all runs, ascending, and the sum of each one's rows, added in
// the order of the runs; returns how many. `ids` and `rows` have room for all rows of all runs.
uint64_t sum_rows(const std::vector<RowRun>& runs, uint64_t dim, int64_t* ids, float* rows);

}  // namespace psengine
