// A group of ranks: joining it, beginning an operation, leaving.
#if defined(__linux__)

#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <stdexcept>

#include "shared_memory/call.h"
#include "shared_memory/layout.h"

namespace psengine {

uint64_t SharedMemoryGroup::control_bytes(uint64_t world_size, uint64_t slot_bytes) {
  return slots_offset(world_size) + world_size * kSlots * slot_bytes;
}

// A power of two; a backward has a few buckets under way.
constexpr size_t kFirstCalls = 16;

static bool has_core_for_each(size_t world_size) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return false;
  return static_cast<size_t>(CPU_COUNT(&cores)) >= world_size;
}

SharedMemoryGroup::SharedMemoryGroup(int file_descriptor, size_t slot_bytes, size_t rank, size_t world_size,
                                     uint64_t token, Order order)
    : rank_(rank),
      world_size_(world_size),
      token_(token),
      order_(order),
      slot_bytes_(slot_bytes),
      control_(file_descriptor, control_bytes(world_size, slot_bytes)),
      may_spin_(has_core_for_each(world_size)),
      process_id_(getpid()),
      peers_(world_size),
      own_segments_(kMaxSegments) {
  region(rank).process_id.store(process_id_);
}

// A forked child holds its parent's object: not to be touched, nor its lock, which another thread of the parent may
// have held at the fork.
bool SharedMemoryGroup::is_forked() const { return getpid() != process_id_; }

void SharedMemoryGroup::close() {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_closed_) return;
  is_closed_ = true;
  region(rank_).is_closed.store(1);
  notify();
}

SharedMemoryGroup::~SharedMemoryGroup() {
  close();
  for (const Peer& peer : peers_)
    if (peer.process_fd >= 0) ::close(peer.process_fd);
}

// ---- beginning an operation --------------------------------------------------------------------------------------

void SharedMemoryGroup::check_process() const {
  if (is_forked())
    throw std::runtime_error("a forked child cannot use its parent's collective; make a process group of its own");
}

void SharedMemoryGroup::check_usable() const {
  if (is_closed_) throw std::runtime_error("the collective is closed");
}

void SharedMemoryGroup::make_room_for_calls() {
  if (next_call_ - first_call_ < calls_.size()) return;
  std::vector<Call> larger(std::max(kFirstCalls, 2 * calls_.size()));
  for (uint64_t number = first_call_; number < next_call_; ++number)
    larger[number & (larger.size() - 1)] = call_at(number);
  calls_.swap(larger);
}

uint64_t SharedMemoryGroup::begin(const Call& begun) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  drop_released_segments();
  make_room_for_calls();
  Call& call = call_at(next_call_);
  call = begun;
  if (call.operation == Operation::all_reduce) {
    size_t bytes = call.numel * call.element_bytes;
    if (bytes > kSmallBytes) call.segment = own_segment_of(call.output, bytes, &call.segment_slot);
    call.is_staged = call.segment == nullptr;
    // Reading W slots and writing once is cheaper than sharing the work, which reads and writes once more, up to W = 2;
    // for small tensors it saves a round trip.
    call.is_summed_by_all = call.is_staged && (bytes <= kSmallBytes || world_size_ <= 2);
  }
  if (call.operation == Operation::sum_contributions) {
    call.segment = own_segment_of(call.output, call.bytes_of(rank_), &call.segment_slot);
    if (call.segment == nullptr) throw std::runtime_error("contributions must lie in memory from allocate()");
    call.is_staged = false;
  } else {
    call.addends = world_size_;
  }
  // Two numbers have the same sum in either order.
  if (call.whole_numel > 0 && order_ == Order::ring && call.addends > 2)
    call.ring_numel = ring_chunk_numel(call.whole_numel, call.element_bytes, call.addends);
  uint64_t slot_numel = slot_bytes_ / call.element_bytes;
  if (call.operation == Operation::reduce_scatter) slot_numel = slot_numel / world_size_ / 64 * 64;
  call.numel_per_round = call.is_staged ? slot_numel : call.numel;
  call.rounds = call.numel == 0 ? 1 : (call.numel + call.numel_per_round - 1) / call.numel_per_round;
  call.first_round = next_round_;
  next_round_ += call.rounds;
  uint64_t number = next_call_++;
  advance();
  return number;
}

uint64_t SharedMemoryGroup::all_reduce(char* data, size_t numel, ScalarKind kind, double scale) {
  Call call{Operation::all_reduce};
  call.kind = kind;
  call.numel = call.whole_numel = numel;
  call.element_bytes = element_bytes(kind);
  call.scale = scale;
  call.input = call.output = data;
  return begin(call);
}

uint64_t SharedMemoryGroup::sum(char* data, size_t numel, ScalarKind kind, double scale) {
  uint64_t operation = all_reduce(data, numel, kind, scale);
  return spin(operation) ? 0 : operation;
}

uint64_t SharedMemoryGroup::broadcast(char* data, size_t bytes, size_t source_rank) {
  if (source_rank >= world_size_)
    throw std::runtime_error("source rank must be below the world size (expected below " + std::to_string(world_size_) +
                             ", got " + std::to_string(source_rank) + ")");
  Call call{Operation::broadcast};
  call.numel = bytes;
  call.source_rank = static_cast<uint32_t>(source_rank);
  call.input = call.output = data;
  return begin(call);
}

uint64_t SharedMemoryGroup::all_gather(const char* input, char* output, size_t bytes) {
  Call call{Operation::all_gather};
  call.numel = bytes;
  call.input = input;
  call.output = output;
  return begin(call);
}

uint64_t SharedMemoryGroup::reduce_scatter(const char* input, char* output, size_t numel, ScalarKind kind,
                                           double scale) {
  Call call{Operation::reduce_scatter};
  call.kind = kind;
  call.numel = numel;
  call.whole_numel = numel * world_size_;
  call.element_bytes = element_bytes(kind);
  call.scale = scale;
  call.input = input;
  call.output = output;
  return begin(call);
}

uint64_t SharedMemoryGroup::barrier() { return begin(Call{Operation::barrier}); }

uint64_t SharedMemoryGroup::sum_contributions(char* memory, size_t numel, ScalarKind kind,
                                              const Contribution* contributions, size_t count) {
  if (count == 0 || count > kMaxAddends)
    throw std::runtime_error("there are none, or too many contributions (expected at most " +
                             std::to_string(kMaxAddends) + ", got " + std::to_string(count) + ")");
  Call call{Operation::sum_contributions};
  call.kind = kind;
  call.numel = call.whole_numel = numel;
  call.element_bytes = element_bytes(kind);
  call.input = call.output = memory;
  call.contributions = contributions;
  call.addends = count;
  call.owners = 1;
  for (size_t number = 0; number < count; ++number) {
    const Contribution& one = contributions[number];
    if (one.rank >= world_size_)
      throw std::runtime_error("contributions belong to ranks below the world size (expected below " +
                               std::to_string(world_size_) + ", got " + std::to_string(one.rank) + ")");
    // A multiplier of linear congruential generators (Knuth, TAOCP 2, 3.3.4).
    call.owners = call.owners * 6364136223846793005u + (uint64_t{one.rank} << 32 | one.row) + 1;
  }
  return begin(call);
}

}  // namespace psengine

#endif  // __linux__
