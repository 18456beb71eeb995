#include "tables/row_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels/kernels.h"

namespace psengine {
namespace {

constexpr int64_t kNoRow = -1;
constexpr uint32_t kAbsent = ~uint32_t(0);
constexpr uint64_t kMostDim = 65536;
constexpr size_t kMostSlots = (size_t(1) << 31) - 1;
constexpr size_t kLargePageBytes = 2 << 20;
// Memory costs nothing until it is touched: a table wastes no more than a large page for each of a block's arrays.
constexpr size_t kBlockBytes = 8 << 20;
constexpr unsigned kFirstIndexBits = 8;
// Ids are looked up together: the memory of all of them is on its way when the first is compared.
constexpr size_t kGroup = 32;
// Rows are fetched this far before they are used; of a long one the processor fetches the rest by itself.
constexpr size_t kRowsAhead = 16;
constexpr size_t kFetchedBytes = 1024;
constexpr size_t kCacheLineBytes = 64;
// Square roots of as many elements at once: few calls of torch, and they stay in the second-level cache.
constexpr size_t kRootsNumel = 16384;
// 1 / the standard deviation of the sum of four numbers uniform in 0..65535.
const double kUnitScale = 1 / std::sqrt((65536.0 * 65536.0 - 1) / 3);

size_t state_numel_of(RowOptimizer optimizer, uint64_t dim) {
  if (dim < 1 || dim > kMostDim)
    throw std::invalid_argument("a table's rows have 1 to " + std::to_string(kMostDim) + " elements (got " +
                                std::to_string(dim) + ")");
  return optimizer == RowOptimizer::adagrad ? dim : optimizer == RowOptimizer::rowwise_adagrad ? 1 : 0;
}

HashKey random_key() {
  std::random_device device;
  const auto number = [&] { return uint64_t(device()) << 32 | device(); };
  return {number(), number()};
}

void check_not_negative(int64_t id, size_t place) {
  if (id < 0)
    throw std::invalid_argument("ids must not be negative (got " + std::to_string(id) + " at place " +
                                std::to_string(place) + ")");
}

void check_ascending(const int64_t* ids, size_t count) {
  if (count > 0) check_not_negative(ids[0], 0);
  for (size_t i = 1; i < count; ++i) {
    if (ids[i - 1] >= ids[i])
      throw std::invalid_argument("ids must ascend, none twice (got " + std::to_string(ids[i - 1]) + " and then " +
                                  std::to_string(ids[i]) + " at place " + std::to_string(i) + ")");
  }
}

}  // namespace

RowTable::RowTable(uint64_t dim, RowOptimizer optimizer, double epsilon, uint64_t seed, uint64_t number, double std,
                   SquareRoots square_roots)
    : dim_(dim),
      state_numel_(state_numel_of(optimizer, dim)),
      row_bytes_((sizeof(Row) + (dim + state_numel_) * sizeof(float) + alignof(Row) - 1) & ~(alignof(Row) - 1)),
      optimizer_(optimizer),
      epsilon_(float(epsilon)),
      scale_(float(std * kUnitScale)),
      seed_{seed, number},
      hash_key_(random_key()),
      square_roots_(square_roots) {
  while (row_bytes_ << (block_bits_ + 1) <= kBlockBytes) ++block_bits_;
  enlarge_index(kFirstIndexBits);
}

// ---- memory

void RowTable::add_block() {
  const size_t bytes = ((row_bytes_ << block_bits_) + kLargePageBytes - 1) & ~(kLargePageBytes - 1);
  Block block(static_cast<char*>(std::aligned_alloc(kLargePageBytes, bytes)), &std::free);
  if (!block) throw std::bad_alloc();
#if defined(__linux__)
  // The first one has small pages: most tables of a test are small.
  if (!blocks_.empty()) madvise(block.get(), bytes, MADV_HUGEPAGE);
#endif
  blocks_.push_back(std::move(block));
}

void RowTable::enlarge_index(unsigned bits) {
  std::vector<uint64_t> former(size_t(1) << bits);
  former.swap(index_);
  index_bits_ = bits;
  for (const uint64_t entry : former) {
    if (entry == 0) continue;
    size_t place = home_of(entry >> 32);
    while (index_[place] != 0) place = after(place);
    index_[place] = entry;
  }
}

// Memory for `count` further rows, before anything is changed.
void RowTable::reserve(size_t count) {
  const size_t slots = slots_used_ + count - std::min(count, free_.size());
  if (slots > kMostSlots) throw std::length_error("a part of a table holds fewer than 2^31 rows");
  while (blocks_.size() << block_bits_ < slots) add_block();
  unsigned bits = index_bits_;
  while (2 * (rows() + count) > uint64_t(1) << bits) ++bits;
  if (bits > index_bits_) enlarge_index(bits);
}

// ---- from id to slot

// Where the id's entry is, or else the empty place where it would be.
size_t RowTable::place_of(uint32_t tag, int64_t id) const {
  size_t place = home_of(tag);
  while (index_[place] != 0 && (index_[place] >> 32 != tag || at(uint32_t(index_[place]) - 1).id != id))
    place = after(place);
  return place;
}

// found_ becomes each id's slot, or kAbsent.
void RowTable::find(const int64_t* ids, size_t count) {
  if (found_.size() < count) found_.resize(count);
  uint32_t tags[kGroup];
  for (size_t begin = 0; begin < count; begin += kGroup) {
    const size_t size = std::min(kGroup, count - begin);
    for (size_t i = 0; i < size; ++i) {
      check_not_negative(ids[begin + i], begin + i);
      tags[i] = tag_of(ids[begin + i]);
      __builtin_prefetch(&index_[home_of(tags[i])]);
    }
    for (size_t i = 0; i < size; ++i) {
      if (const uint64_t entry = index_[home_of(tags[i])]) __builtin_prefetch(&at(uint32_t(entry) - 1));
    }
    for (size_t i = 0; i < size; ++i) {
      const uint64_t entry = index_[place_of(tags[i], ids[begin + i])];
      found_[begin + i] = entry == 0 ? kAbsent : uint32_t(entry) - 1;
    }
  }
}

// The same; absent ones become rows with the values that they had, and empty state.
void RowTable::find_or_insert(const int64_t* ids, size_t count) {
  reserve(count_absent(ids, count));
  for (size_t i = 0; i < count; ++i) {
    if (found_[i] != kAbsent) continue;
    const uint32_t tag = tag_of(ids[i]);
    uint64_t& entry = index_[place_of(tag, ids[i])];
    if (entry == 0) {  // an id that is there twice has got its row by now
      const bool is_new = free_.empty();
      const uint32_t slot = is_new ? uint32_t(slots_used_++) : free_.back();
      if (!is_new) free_.pop_back();
      entry = uint64_t(tag) << 32 | (slot + 1);
      at(slot).id = ids[i];
      draw(ids[i], at(slot).values());
      std::fill_n(at(slot).values() + dim_, state_numel_, 0.0f);
    }
    found_[i] = uint32_t(entry) - 1;
  }
}

void RowTable::erase(uint32_t slot) {
  const int64_t id = at(slot).id;
  size_t hole = place_of(tag_of(id), id);
  const size_t mask = index_.size() - 1;
  for (size_t next = after(hole); index_[next] != 0; next = after(next)) {
    const size_t home = home_of(index_[next] >> 32);
    if (((next - home) & mask) < ((next - hole) & mask)) continue;  // it must not go before its home
    index_[hole] = index_[next];
    hole = next;
  }
  index_[hole] = 0;
  at(slot).id = kNoRow;
  free_.push_back(slot);
}

// ---- rows

void RowTable::draw(int64_t id, float* values) const {
  if (scale_ == 0) {  // the product would have zeros with a sign
    std::fill_n(values, dim_, 0.0f);
  } else {
    kernels().draw_row(values, dim_, siphash(seed_, uint64_t(id)), scale_);
  }
}

// What the call's row number i + kRowsAhead needs.
void RowTable::fetch(size_t i, size_t count) const {
  if (i + kRowsAhead >= count || found_[i + kRowsAhead] == kAbsent) return;
  const char* const memory = reinterpret_cast<const char*>(&at(found_[i + kRowsAhead]));
  for (size_t j = 0; j < std::min(row_bytes_, kFetchedBytes); j += kCacheLineBytes) __builtin_prefetch(memory + j, 1);
}

void RowTable::gather(const int64_t* ids, uint64_t count, float* out) {
  find(ids, count);
  for (size_t i = 0; i < count; ++i) {
    fetch(i, count);
    if (found_[i] == kAbsent) {
      draw(ids[i], out + i * dim_);
    } else {
      std::copy_n(at(found_[i]).values(), dim_, out + i * dim_);
    }
  }
}

uint64_t RowTable::count_absent(const int64_t* ids, uint64_t count) {
  find(ids, count);
  return uint64_t(std::count(found_.begin(), found_.begin() + ptrdiff_t(count), kAbsent));
}

void RowTable::store(const int64_t* ids, uint64_t count, const float* rows, const float* states,
                     const int64_t* stamps) {
  find_or_insert(ids, count);
  for (size_t i = 0; i < count; ++i) {
    Row& row = at(found_[i]);
    row.stamp = stamps[i];
    std::copy_n(rows + i * dim_, dim_, row.values());
    std::copy_n(states + i * state_numel_, state_numel_, row.values() + dim_);
  }
  oldest_.clear();
}

void RowTable::step(const int64_t* ids, uint64_t count, const float* gradients, double learning_rate, uint64_t stamp) {
  check_ascending(ids, count);
  const Kernels& use = kernels();
  const float rate = float(-learning_rate);
  const bool has_roots = optimizer_ == RowOptimizer::adagrad;
  if (has_roots) roots_.resize(std::max(kRootsNumel, dim_));
  find_or_insert(ids, count);
  if (!oldest_.empty() && int64_t(stamp) <= oldest_.front().stamp) oldest_.clear();
  const size_t most = has_roots ? std::max<size_t>(kRootsNumel / dim_, 1) : std::max<size_t>(count, 1);
  for (size_t begin = 0; begin < count; begin += most) {
    const size_t end = std::min<size_t>(count, begin + most);
    for (size_t i = begin; i < end; ++i) {
      const float* const gradient = gradients + i * dim_;
      fetch(i, count);
      Row& row = at(found_[i]);
      row.stamp = int64_t(stamp);
      switch (optimizer_) {
        case RowOptimizer::sgd:
          use.add_to_row(row.values(), gradient, dim_, rate);
          break;
        case RowOptimizer::adagrad:
          use.add_squares(row.values() + dim_, roots_.data() + (i - begin) * dim_, gradient, dim_);
          break;
        case RowOptimizer::rowwise_adagrad:
          float& sum = row.values()[dim_];
          sum += use.sum_of_squares(gradient, dim_) / float(dim_);
          use.add_to_row(row.values(), gradient, dim_, rate / (std::sqrt(sum) + epsilon_));
      }
    }
    if (!has_roots) break;
    square_roots_(roots_.data(), (end - begin) * dim_);
    for (size_t i = begin; i < end; ++i)
      use.add_scaled_to_row(at(found_[i]).values(), gradients + i * dim_, roots_.data() + (i - begin) * dim_, dim_,
                            rate, epsilon_);
  }
}

uint64_t RowTable::read(uint64_t begin, uint64_t end, uint64_t least_stamp, int64_t* ids, float* rows, float* states,
                        int64_t* stamps) {
  uint64_t done = 0;
  for (uint64_t slot = begin; slot < std::min<uint64_t>(end, slots_used_); ++slot) {
    Row& row = at(uint32_t(slot));
    if (row.id == kNoRow || uint64_t(row.stamp) < least_stamp) continue;
    if (ids != nullptr) {
      ids[done] = row.id;
      stamps[done] = row.stamp;
      std::copy_n(row.values(), dim_, rows + done * dim_);
      std::copy_n(row.values() + dim_, state_numel_, states + done * state_numel_);
    }
    ++done;
  }
  return done;
}

// ---- the least recently pushed

// oldest_ becomes the `count` oldest of all rows.
void RowTable::find_oldest(size_t count) {
  const auto is_newer = [](const Pushed& a, const Pushed& b) {
    return std::tie(a.stamp, a.id) > std::tie(b.stamp, b.id);
  };
  oldest_.clear();
  for (uint32_t slot = 0; slot < slots_used_; ++slot) {
    if (at(slot).id != kNoRow) oldest_.push_back({at(slot).stamp, at(slot).id, slot});
  }
  const auto first = oldest_.end() - ptrdiff_t(std::min(count, oldest_.size()));
  std::nth_element(oldest_.begin(), first, oldest_.end(), is_newer);
  oldest_.erase(oldest_.begin(), first);
  oldest_.shrink_to_fit();
  std::sort(oldest_.begin(), oldest_.end(), is_newer);
}

uint64_t RowTable::evict(uint64_t count, const int64_t* keep, uint64_t keep_count, int64_t* evicted) {
  check_ascending(keep, keep_count);
  count = std::min(count, rows());
  free_.reserve(free_.size() + count);
  std::vector<Pushed> kept;
  bool has_found_all = false;
  uint64_t done = 0;
  while (done < count) {
    if (oldest_.empty()) {
      if (std::exchange(has_found_all, true)) break;
      // Enough for this call, and for many more: a search costs as much as all rows.
      find_oldest(count + keep_count + rows() / 8);
      kept.clear();
      continue;
    }
    const Pushed pushed = oldest_.back();
    oldest_.pop_back();
    if (at(pushed.slot).id != pushed.id || at(pushed.slot).stamp != pushed.stamp) continue;
    if (std::binary_search(keep, keep + keep_count, pushed.id)) {
      kept.push_back(pushed);
    } else {
      evicted[done++] = pushed.id;
      erase(pushed.slot);
    }
  }
  oldest_.insert(oldest_.end(), kept.rbegin(), kept.rend());
  return done;
}

// ---- rows outside a table

void find_parts(const int64_t* ids, uint64_t count, uint64_t parts, uint64_t seed, int64_t* out) {
  constexpr uint64_t kPurpose = 0x7061727473;  // apart from the keys of rows' values
  for (uint64_t i = 0; i < count; ++i)
    out[i] = int64_t((siphash({seed, kPurpose}, uint64_t(ids[i])) >> 32) * parts >> 32);
}

uint64_t sum_rows(const std::vector<RowRun>& runs, uint64_t dim, int64_t* ids, float* rows) {
  for (const RowRun& run : runs) check_ascending(run.ids, run.count);
  std::vector<uint64_t> next(runs.size(), 0);
  for (uint64_t done = 0;; ++done) {
    const int64_t* lowest = nullptr;
    for (size_t r = 0; r < runs.size(); ++r) {
      const int64_t* const id = runs[r].ids + next[r];
      if (next[r] < runs[r].count && (lowest == nullptr || *id < *lowest)) lowest = id;
    }
    if (lowest == nullptr) return done;
    ids[done] = *lowest;
    float* const sum = rows + done * dim;
    bool is_first = true;
    for (size_t r = 0; r < runs.size(); ++r) {
      if (next[r] == runs[r].count || runs[r].ids[next[r]] != ids[done]) continue;
      const float* const row = runs[r].rows + next[r]++ * dim;
      if (std::exchange(is_first, false)) {
        std::copy_n(row, dim, sum);
      } else {
        kernels().add_to_row(sum, row, dim, 1.0f);
      }
    }
  }
}

}  // namespace psengine
