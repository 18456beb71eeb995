// The three cursors of a rank: it enters rounds, sums their chunks, finishes them.
#if defined(__linux__)

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "shared_memory/call.h"
#include "shared_memory/layout.h"

namespace psengine {

// A process that is being killed loses its files before it counts as ended; this long is waited for the latter.
constexpr int kDyingMs = 1000;

uint64_t SharedMemoryGroup::progress() {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  advance();
  return first_call_ - 1;
}

// Sums with the default rounding and with subnormal numbers, whatever the calling thread has chosen: ranks with another
// torch.set_flush_denormal would sum their chunks, or their copies of a small tensor, to other bits.
class DefaultFloatingPoint {
#if defined(__x86_64__)
 public:
  DefaultFloatingPoint() : chosen_(_mm_getcsr()) {
    if ((chosen_ & kControl) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatingPoint() {
    if ((chosen_ & kControl) != kDefault) _mm_setcsr(chosen_);
  }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  static constexpr unsigned kControl = 0xffc0;  // of MXCSR, without the flags of what has happened
  static constexpr unsigned kDefault = 0x1f80;  // no exceptions, to nearest even
  unsigned chosen_;
#else
 public:
  DefaultFloatingPoint() {}  // not trivial, or its only variable would be called unused
#endif
};

bool SharedMemoryGroup::advance() {
  DefaultFloatingPoint during_sums;
  bool has_moved = false;
  try {
    // After a failure nobody enters another round, but one that all had entered still ends: whether an operation
    // succeeds should not depend on who looked before the failure and who after. It still may: a rank that is told of
    // the failure while another sums the last chunk reports it, where the other reports success.
    while (own_error_.empty()) {
      bool may_enter = header().failure.load(std::memory_order_acquire) == 0;
      bool has_entered = may_enter && enter_rounds();
      bool has_reduced = reduce_rounds();
      bool has_finished = finish_rounds();
      if (!has_entered && !has_reduced && !has_finished) break;
      has_moved = true;
    }
  } catch (const std::exception& error) {
    // The others need not wait for this rank; and from here on no cursor of its own moves, so that nothing touches
    // memory whose owner has seen the exception.
    own_error_ = error.what();
    fail(WaitStatus::closed, uint64_t{1} << rank_);
    throw;
  }
  first_call_ = finish_.call;
  return has_moved;
}

void SharedMemoryGroup::move_on(Cursor& cursor) {
  const Call& call = call_at(cursor.call);
  ++cursor.round;
  if (cursor.round == call.first_round + call.rounds) ++cursor.call;
}

// With acquire, of a release: what each rank has read of others' memory, it read before this one writes there again.
bool SharedMemoryGroup::have_all_finished(uint64_t round) {
  if (all_finished_ >= round) return true;
  all_finished_ = UINT64_MAX;
  for (size_t rank = 0; rank < world_size_; ++rank)
    all_finished_ = std::min(all_finished_, region(rank).finished.load(std::memory_order_acquire));
  return all_finished_ >= round;
}

// Descriptors hold their round until every rank has finished it.
bool SharedMemoryGroup::have_arrived(const Call& call, uint64_t round) const {
  auto has_arrived = [&](size_t rank) {
    return descriptor(rank, round).round.load(std::memory_order_acquire) == round;
  };
  if (call.operation == Operation::broadcast) return has_arrived(call.source_rank);
  for (size_t rank = 0; rank < world_size_; ++rank)
    if (!has_arrived(rank)) return false;
  return true;
}

bool SharedMemoryGroup::enter_rounds() {
  bool has_moved = false;
  while (enter_.round < next_round_) {
    const Call& call = call_at(enter_.call);
    uint64_t reused_after = call.is_staged ? kSlots : kRingRounds;
    if (enter_.round > reused_after && !have_all_finished(enter_.round - reused_after)) break;
    enter(call, enter_.round);
    move_on(enter_);
    has_moved = true;
  }
  return has_moved;
}

void SharedMemoryGroup::enter(const Call& call, uint64_t round) {
  Descriptor& description = descriptor(rank_, round);
  description.numel = call.numel;
  description.scale = call.scale;
  description.operation = call.operation;
  description.kind = call.kind;
  description.source_rank = call.source_rank;
  description.is_staged = call.is_staged;
  description.owners = call.owners;
  if (!call.is_staged) {
    description.segment_slot = call.segment_slot;
    description.segment_id = region(rank_).segments[call.segment_slot].id.load(std::memory_order_relaxed);
    description.offset_bytes = static_cast<uint64_t>(call.input - call.segment);
  } else if (call.operation == Operation::reduce_scatter) {
    uint64_t bytes = call.numel_of(round) * call.element_bytes;
    for (size_t rank = 0; rank < world_size_; ++rank)
      std::memcpy(slot(rank_, round) + rank * call.numel_per_round * call.element_bytes,
                  call.input + (rank * call.numel + call.begin_of(round)) * call.element_bytes, bytes);
  } else if (call.numel > 0 && (call.operation != Operation::broadcast || call.source_rank == rank_)) {
    std::memcpy(slot(rank_, round), call.input + call.begin_of(round) * call.element_bytes,
                call.numel_of(round) * call.element_bytes);
  }
  description.round.store(round, std::memory_order_release);
  region(rank_).arrived.store(round, std::memory_order_release);
  notify();
}

bool SharedMemoryGroup::reduce_rounds() {
  bool has_moved = false;
  while (reduce_.round < enter_.round) {
    Call& call = call_at(reduce_.call);
    if (call.has_chunks()) {
      if (!have_arrived(call, reduce_.round)) break;
      if (!check_agreement(call, reduce_.round)) break;
      reduce_claimed_chunks(call, reduce_.round);
    }
    move_on(reduce_);
    has_moved = true;
  }
  return has_moved;
}

// The count in `word` if it is this round's, else zero.
static uint64_t count_of(uint64_t word, uint64_t round) {
  return (word >> 32) == (round & 0xffffffff) ? word & 0xffffffff : 0;
}

static uint64_t add_one(std::atomic<uint64_t>& word, uint64_t round, uint64_t limit) {
  uint64_t seen = word.load(std::memory_order_acquire);
  while (true) {
    uint64_t count = count_of(seen, round);
    if (count >= limit) return limit;
    if (word.compare_exchange_weak(seen, (round << 32) | (count + 1), std::memory_order_acq_rel)) return count;
  }
}

void SharedMemoryGroup::reduce_claimed_chunks(Call& call, uint64_t round) {
  Round& state = round_state(round);
  uint64_t chunks = call.chunks(round), chunk_numel = call.chunk_numel(), numel = call.numel_of(round);
  if (count_of(state.claimed.load(std::memory_order_acquire), round) >= chunks) return;
  std::array<char*, kMaxWorldSize> memory;
  if (!find_memory(call, round, &memory)) return;
  region(rank_).summing.store(round, std::memory_order_relaxed);  // seen by all who see one of its claims
  for (uint64_t chunk; (chunk = add_one(state.claimed, round, chunks)) < chunks;) {
    uint64_t begin = chunk * chunk_numel;
    std::array<char*, kMaxAddends> addends;
    std::array<char*, kMaxWorldSize> sums;
    for (size_t rank = 0; rank < world_size_; ++rank)
      addends[rank] = sums[rank] = memory[rank] + begin * call.element_bytes;
    if (call.contributions != nullptr) {
      for (size_t number = 0; number < call.addends; ++number) {
        const Contribution& one = call.contributions[number];
        addends[number] = sums[one.rank] + one.row * call.numel * call.element_bytes;
      }
    }
    // A staged sum is needed once, in rank 0's slot, from where everybody copies it.
    add(call, call.begin_of(round) + begin, std::min(chunk_numel, numel - begin), addends.data(), sums.data(),
        call.is_staged ? 1 : world_size_);
    if (add_one(state.done, round, chunks) == chunks - 1) notify();
  }
  region(rank_).summing.store(0, std::memory_order_release);
}

// Add `numel` elements of every addend, from their addresses by number, and write the sums. `first`: where they lie in the
// whole tensor, which decides in which order they are added.
void SharedMemoryGroup::add(const Call& call, uint64_t first, uint64_t numel, char* const* addends, char* const* sums,
                            size_t sum_count) {
  std::array<void*, kMaxWorldSize> destinations;
  std::array<const void*, kMaxAddends> sources;
  for (uint64_t begin = 0; begin < numel;) {
    uint64_t chunk = call.ring_numel == 0 ? 0 : (first + begin) / call.ring_numel;
    uint64_t end = call.ring_numel == 0 ? numel : std::min(numel, (chunk + 1) * call.ring_numel - first);
    for (size_t step = 0; step < call.addends; ++step) {
      size_t number = call.ring_numel == 0 ? step : ring_rank(chunk, step, call.addends);
      sources[step] = addends[number] + begin * call.element_bytes;
    }
    for (size_t sum = 0; sum < sum_count; ++sum) destinations[sum] = sums[sum] + begin * call.element_bytes;
    kernels().sum(destinations.data(), sum_count, sources.data(), call.addends, call.kind, end - begin, call.scale,
                  order_ == Order::rank);
    begin = end;
  }
}

// Where each rank's addends of the round begin; false where there is nothing left to sum, or a rank has died.
bool SharedMemoryGroup::find_memory(const Call& call, uint64_t round, std::array<char*, kMaxWorldSize>* memory) {
  for (size_t rank = 0; rank < world_size_; ++rank) {
    if (call.is_staged) {
      (*memory)[rank] = slot(rank, round);
    } else if (rank == rank_) {
      (*memory)[rank] = call.output;
    } else {
      try {
        (*memory)[rank] = peer_data(rank, call, round);
      } catch (const std::runtime_error&) {
        // Once every chunk is claimed the round may complete without us, and its memory go.
        uint64_t claimed = count_of(round_state(round).claimed.load(std::memory_order_acquire), round);
        if (claimed >= call.chunks(round)) return false;
        if (is_running(rank, kDyingMs)) throw;
        fail(WaitStatus::lost, uint64_t{1} << rank);
        return false;
      }
    }
  }
  return true;
}

bool SharedMemoryGroup::finish_rounds() {
  bool has_moved = false;
  while (finish_.round < reduce_.round) {
    Call& call = call_at(finish_.call);
    uint64_t round = finish_.round;
    if (call.has_chunks()) {
      if (count_of(round_state(round).done.load(std::memory_order_acquire), round) < call.chunks(round)) break;
    } else if (!have_arrived(call, round) || !check_agreement(call, round)) {
      break;
    }
    finish(call, round);
    region(rank_).finished.store(round, std::memory_order_release);
    notify();
    move_on(finish_);
    has_moved = true;
  }
  return has_moved;
}

void SharedMemoryGroup::finish(Call& call, uint64_t round) {
  uint64_t begin = call.begin_of(round), numel = call.numel == 0 ? 0 : call.numel_of(round);
  char* output = call.output + begin * call.element_bytes;
  switch (call.operation) {
    case Operation::all_reduce:
      if (call.is_summed_by_all) {
        std::array<char*, kMaxWorldSize> addends;
        for (size_t rank = 0; rank < world_size_; ++rank) addends[rank] = slot(rank, round);
        add(call, begin, numel, addends.data(), &output, 1);
      } else if (call.is_staged) {
        std::memcpy(output, slot(0, round), numel * call.element_bytes);
      }
      return;
    case Operation::broadcast:
      if (call.source_rank != rank_ && numel > 0) std::memcpy(output, slot(call.source_rank, round), numel);
      return;
    case Operation::all_gather:
      for (size_t rank = 0; rank < world_size_ && numel > 0; ++rank)
        std::memcpy(call.output + rank * call.numel + begin, slot(rank, round), numel);
      return;
    case Operation::reduce_scatter: {
      std::array<char*, kMaxWorldSize> addends;
      for (size_t rank = 0; rank < world_size_; ++rank)
        addends[rank] = slot(rank, round) + rank_ * call.numel_per_round * call.element_bytes;
      add(call, rank_ * call.numel + begin, numel, addends.data(), &output, 1);
      return;
    }
    case Operation::barrier:
    case Operation::sum_contributions:  // the chunks are where they belong
      return;
  }
}

}  // namespace psengine

#endif  // __linux__
