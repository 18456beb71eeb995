#if defined(__linux__)

#include "shared_memory/group.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "shared_memory/call.h"
#include "shared_memory/layout.h"

namespace psengine {

// A process that is being killed loses its files before it counts as ended; this long is waited for the latter.
constexpr int kDyingMs = 1000;

SharedMemoryGroup::Call& SharedMemoryGroup::call_at(uint64_t number) { return calls_[number - first_call_]; }

RankRegion& SharedMemoryGroup::region(size_t rank) const {
  auto* regions = reinterpret_cast<RankRegion*>(control_.data() + sizeof(ControlHeader) + kRingRounds * sizeof(Round));
  return regions[rank];
}

Round& SharedMemoryGroup::round_state(uint64_t round) const {
  return reinterpret_cast<Round*>(control_.data() + sizeof(ControlHeader))[round % kRingRounds];
}

Descriptor& SharedMemoryGroup::descriptor(size_t rank, uint64_t round) const {
  return region(rank).descriptors[round % kRingRounds];
}

char* SharedMemoryGroup::slot(size_t rank, uint64_t round) const {
  return control_.data() + slots_offset(world_size_) + (rank * kSlots + round % kSlots) * slot_bytes_;
}

ControlHeader& SharedMemoryGroup::header() const { return *reinterpret_cast<ControlHeader*>(control_.data()); }

// ---- joining and leaving -----------------------------------------------------------------------------------------

int SharedMemoryGroup::create_control(size_t world_size, size_t slot_bytes, const Token& token) {
  if (world_size == 0 || world_size > kMaxWorldSize)
    throw std::runtime_error("world size must be within 1 and 64 (got " + std::to_string(world_size) + ")");
  if (slot_bytes < world_size * kSmallBytes || slot_bytes % kPageBytes != 0)
    throw std::runtime_error("staging slots must be whole pages and hold 16 KiB for each rank (got " +
                             std::to_string(slot_bytes) + " bytes for " + std::to_string(world_size) + " ranks)");
  size_t bytes = control_bytes(world_size, slot_bytes);
  int file_descriptor = create_anonymous_file("psengine-control", bytes);
  try {
    Mapping mapping(file_descriptor, sizeof(ControlHeader));
    auto* header = reinterpret_cast<ControlHeader*>(mapping.data());
    header->world_size = world_size;
    header->slot_bytes = slot_bytes;
    header->token = token;
    header->magic = kMagic;
  } catch (...) {
    ::close(file_descriptor);
    throw;
  }
  return file_descriptor;
}

static bool has_core_for_each(size_t world_size) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return false;
  return static_cast<size_t>(CPU_COUNT(&cores)) >= world_size;
}

SharedMemoryGroup::SharedMemoryGroup(const std::string& path, size_t rank, size_t world_size, const Token& token)
    : rank_(rank), world_size_(world_size), token_(token), process_id_(getpid()), peers_(world_size) {
  if (rank >= world_size || world_size > kMaxWorldSize) throw std::runtime_error("rank or world size out of range");
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) throw system_error("cannot see a peer's shared memory " + path);
  auto bytes = static_cast<size_t>(status.st_size);
  control_ = map_path(path, bytes, [&](const char* page) {
    const auto* found = reinterpret_cast<const ControlHeader*>(page);
    return bytes >= sizeof(ControlHeader) && found->magic == kMagic && found->token == token &&
           found->world_size == world_size && bytes == control_bytes(world_size, found->slot_bytes);
  });
  slot_bytes_ = header().slot_bytes;
  may_spin_ = has_core_for_each(world_size);
  own_segments_.assign(kMaxSegments, nullptr);
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

// ---- memory for tensors ------------------------------------------------------------------------------------------

size_t SharedMemoryGroup::adopt_segment(int file_descriptor, size_t bytes, char* address) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  Segment* segments = region(rank_).segments;
  size_t index = 0;
  while (index < kMaxSegments && segments[index].id.load() != 0) ++index;
  if (index == kMaxSegments) throw std::runtime_error("more than 64 pieces of shared memory are in use on this rank");
  seal_size(file_descriptor);
  uint32_t id = ++last_segment_id_;
  *reinterpret_cast<SegmentHeader*>(address) = SegmentHeader{kMagic, id, token_};
  own_segments_[index] = address;
  segments[index].file_descriptor.store(file_descriptor);
  segments[index].bytes.store(bytes);
  segments[index].id.store(id, std::memory_order_release);
  return index;
}

void SharedMemoryGroup::release_segment(size_t index) {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  own_segments_.at(index) = nullptr;
  region(rank_).segments[index].id.store(0);
  region(rank_).releases.fetch_add(1, std::memory_order_release);
}

// Give back the memory of segments whose owners have released them: nobody releases what an unfinished round needs.
void SharedMemoryGroup::drop_released_segments() {
  for (size_t rank = 0; rank < world_size_; ++rank) {
    Peer& peer = peers_[rank];
    uint64_t releases = region(rank).releases.load(std::memory_order_acquire);
    if (releases == peer.releases) continue;
    peer.releases = releases;
    const Segment* segments = region(rank).segments;
    for (auto entry = peer.segments.begin(); entry != peer.segments.end();) {
      bool is_live =
          std::any_of(segments, segments + kMaxSegments, [&](const Segment& s) { return s.id == entry->first; });
      entry = is_live ? std::next(entry) : peer.segments.erase(entry);
    }
  }
}

const char* SharedMemoryGroup::own_segment_of(const char* data, size_t bytes, uint32_t* slot) const {
  for (size_t index = 0; index < kMaxSegments; ++index) {
    const char* begin = own_segments_[index];
    if (begin != nullptr && data >= begin + sizeof(SegmentHeader) &&
        data + bytes <= begin + region(rank_).segments[index].bytes.load()) {
      *slot = static_cast<uint32_t>(index);
      return begin;
    }
  }
  return nullptr;
}

Mapping& SharedMemoryGroup::peer_segment(size_t rank, uint32_t slot, uint32_t id) {
  auto& mapped = peers_[rank].segments;
  auto found = mapped.find(id);
  if (found != mapped.end()) return found->second;
  const Segment* segments = region(rank).segments;
  if (slot >= kMaxSegments || segments[slot].id.load(std::memory_order_acquire) != id)
    throw std::runtime_error("rank " + std::to_string(rank) + " named a piece of shared memory it does not have");
  std::string path = "/proc/" + std::to_string(region(rank).process_id.load()) + "/fd/" +
                     std::to_string(segments[slot].file_descriptor.load());
  Mapping mapping = map_path(path, segments[slot].bytes.load(), [&](const char* page) {
    const auto* header = reinterpret_cast<const SegmentHeader*>(page);
    return header->magic == kMagic && header->id == id && header->token == token_;
  });
  return mapped.emplace(id, std::move(mapping)).first->second;
}

// The round's piece of another rank's tensor that is reduced in place.
char* SharedMemoryGroup::peer_data(size_t rank, const Call& call, uint64_t round) {
  const Descriptor& description = descriptor(rank, round);
  Mapping& mapping = peer_segment(rank, description.segment_slot, description.segment_id);
  uint64_t bytes = call.numel * call.element_bytes;
  if (description.offset_bytes < sizeof(SegmentHeader) || description.offset_bytes > mapping.bytes() ||
      bytes > mapping.bytes() - description.offset_bytes)
    throw std::runtime_error("rank " + std::to_string(rank) + " named memory outside its piece");
  return mapping.data() + description.offset_bytes;
}

// ---- beginning an operation --------------------------------------------------------------------------------------

void SharedMemoryGroup::check_process() const {
  if (is_forked())
    throw std::runtime_error("a forked child cannot use its parent's collective; make a process group of its own");
}

void SharedMemoryGroup::check_usable() const {
  if (is_closed_) throw std::runtime_error("the collective is closed");
}

uint64_t SharedMemoryGroup::begin(Call call) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  drop_released_segments();
  if (call.operation == Operation::all_reduce) {
    size_t bytes = call.numel * call.element_bytes;
    if (bytes > kSmallBytes) call.segment = own_segment_of(call.output, bytes, &call.segment_slot);
    call.is_staged = call.segment == nullptr;
    // Reading W slots and writing once is cheaper than sharing the work, which reads and writes once more, up to W = 2;
    // for small tensors it saves a round trip.
    call.is_summed_by_all = call.is_staged && (bytes <= kSmallBytes || world_size_ <= 2);
  }
  uint64_t slot_numel = slot_bytes_ / call.element_bytes;
  if (call.operation == Operation::reduce_scatter) slot_numel = slot_numel / world_size_ / 64 * 64;
  call.numel_per_round = call.is_staged ? slot_numel : call.numel;
  call.rounds = call.numel == 0 ? 1 : (call.numel + call.numel_per_round - 1) / call.numel_per_round;
  call.first_round = next_round_;
  calls_.push_back(call);
  next_round_ += call.rounds;
  uint64_t number = first_call_ + calls_.size() - 1;
  advance();
  return number;
}

uint64_t SharedMemoryGroup::all_reduce(char* data, size_t numel, ScalarKind kind, double scale, bool wants_square_sum) {
  Call call{Operation::all_reduce};
  call.kind = kind;
  call.numel = numel;
  call.element_bytes = element_bytes(kind);
  call.scale = scale;
  call.input = call.output = data;
  call.wants_square_sum = wants_square_sum;
  return begin(call);
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
  call.element_bytes = element_bytes(kind);
  call.scale = scale;
  call.input = input;
  call.output = output;
  return begin(call);
}

uint64_t SharedMemoryGroup::barrier() { return begin(Call{Operation::barrier}); }

// ---- the three cursors -------------------------------------------------------------------------------------------

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
  while (!calls_.empty() && first_call_ < finish_.call) {
    if (calls_.front().wants_square_sum) square_sums_[first_call_] = calls_.front().square_sum;
    calls_.pop_front();
    ++first_call_;
  }
  return has_moved;
}

void SharedMemoryGroup::move_on(Cursor& cursor) {
  const Call& call = call_at(cursor.call);
  ++cursor.round;
  if (cursor.round == call.first_round + call.rounds) ++cursor.call;
}

bool SharedMemoryGroup::have_all(std::atomic<uint64_t> RankRegion::* counter, uint64_t round) const {
  for (size_t rank = 0; rank < world_size_; ++rank)
    if ((region(rank).*counter).load(std::memory_order_acquire) < round) return false;
  return true;
}

bool SharedMemoryGroup::have_arrived(const Call& call, uint64_t round) const {
  if (call.operation == Operation::broadcast)
    return region(call.source_rank).arrived.load(std::memory_order_acquire) >= round;
  return have_all(&RankRegion::arrived, round);
}

bool SharedMemoryGroup::enter_rounds() {
  bool has_moved = false;
  while (enter_.round < next_round_) {
    const Call& call = call_at(enter_.call);
    uint64_t reused_after = call.is_staged ? kSlots : kRingRounds;
    if (enter_.round > reused_after && !have_all(&RankRegion::finished, enter_.round - reused_after)) break;
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
  uint64_t chunks = call.chunks(round), chunk_numel = call.chunk_numel(round), numel = call.numel_of(round);
  if (count_of(state.claimed.load(std::memory_order_acquire), round) >= chunks) return;
  std::array<char*, kMaxWorldSize> memory;
  if (!find_memory(call, round, &memory)) return;
  region(rank_).summing.store(round, std::memory_order_relaxed);  // seen by all who see one of its claims
  for (uint64_t chunk; (chunk = add_one(state.claimed, round, chunks)) < chunks;) {
    uint64_t begin = chunk * chunk_numel;
    std::array<void*, kMaxWorldSize> destinations;
    std::array<const void*, kMaxWorldSize> sources;
    for (size_t rank = 0; rank < world_size_; ++rank)
      destinations[rank] = memory[rank] + begin * call.element_bytes, sources[rank] = destinations[rank];
    double square_sum = std::numeric_limits<double>::quiet_NaN();
    // A staged sum is needed once, in rank 0's slot, from where everybody copies it.
    kernels().sum(destinations.data(), call.is_staged ? 1 : world_size_, sources.data(), world_size_, call.kind,
                  std::min(chunk_numel, numel - begin), call.scale, call.wants_square_sum ? &square_sum : nullptr);
    state.square_sums[chunk].store(square_sum, std::memory_order_relaxed);
    if (add_one(state.done, round, chunks) == chunks - 1) notify();
  }
  region(rank_).summing.store(0, std::memory_order_release);
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
        std::array<const void*, kMaxWorldSize> sources;
        for (size_t rank = 0; rank < world_size_; ++rank) sources[rank] = slot(rank, round);
        void* destination = output;
        double square_sum = 0.0;
        kernels().sum(&destination, 1, sources.data(), world_size_, call.kind, numel, call.scale,
                      call.wants_square_sum ? &square_sum : nullptr);
        call.square_sum += square_sum;
        return;
      }
      if (call.wants_square_sum)
        for (uint64_t chunk = 0; chunk < call.chunks(round); ++chunk)
          call.square_sum += round_state(round).square_sums[chunk].load(std::memory_order_relaxed);
      if (call.is_staged) std::memcpy(output, slot(0, round), numel * call.element_bytes);
      return;
    case Operation::broadcast:
      if (call.source_rank != rank_ && numel > 0) std::memcpy(output, slot(call.source_rank, round), numel);
      return;
    case Operation::all_gather:
      for (size_t rank = 0; rank < world_size_ && numel > 0; ++rank)
        std::memcpy(call.output + rank * call.numel + begin, slot(rank, round), numel);
      return;
    case Operation::reduce_scatter: {
      std::array<const void*, kMaxWorldSize> sources;
      for (size_t rank = 0; rank < world_size_; ++rank)
        sources[rank] = slot(rank, round) + rank_ * call.numel_per_round * call.element_bytes;
      void* destination = output;
      kernels().sum(&destination, 1, sources.data(), world_size_, call.kind, numel, call.scale, nullptr);
      return;
    }
    case Operation::barrier:
      return;
  }
}

double SharedMemoryGroup::take_square_sum(uint64_t operation) {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = square_sums_.find(operation);
  if (found == square_sums_.end()) return std::numeric_limits<double>::quiet_NaN();
  double value = found->second;
  square_sums_.erase(found);
  return value;
}

// ---- agreement ---------------------------------------------------------------------------------------------------

static bool is_same(const Descriptor& one, const Descriptor& other) {
  return one.operation == other.operation && one.numel == other.numel && one.kind == other.kind &&
         std::memcmp(&one.scale, &other.scale, sizeof(one.scale)) == 0 && one.source_rank == other.source_rank &&
         one.is_staged == other.is_staged;
}

static std::string describe(const Descriptor& called) {
  static const char* kinds[] = {"float32", "float64", "float16", "bfloat16", "int32", "int64"};
  std::string numel = std::to_string(called.numel);
  auto kind = static_cast<size_t>(called.kind);
  std::string elements = numel + " elements of " + (kind < std::size(kinds) ? kinds[kind] : "an unknown kind");
  switch (called.operation) {
    case Operation::all_reduce:
      return "all_reduce of " + elements + " times " + std::to_string(called.scale) +
             (called.is_staged ? "" : " in memory from allocate()");
    case Operation::reduce_scatter:
      return "reduce_scatter of " + elements + " a rank";
    case Operation::broadcast:
      return "broadcast of " + numel + " bytes from rank " + std::to_string(called.source_rank);
    case Operation::all_gather:
      return "all_gather of " + numel + " bytes";
    case Operation::barrier:
      return "barrier";
  }
  return "an unknown operation";
}

// What this rank, or the first one that has arrived at the round, and another have called. The descriptions stay,
// because nobody enters the round that would use their place while this one is not finished by all.
std::string SharedMemoryGroup::describe_difference(uint64_t round) const {
  auto has_arrived = [&](size_t rank) { return region(rank).arrived.load(std::memory_order_acquire) >= round; };
  size_t one = rank_;
  for (size_t rank = 0; rank < world_size_ && !has_arrived(one); ++rank) one = rank;
  for (size_t other = 0; other < world_size_; ++other) {
    if (!has_arrived(other) || is_same(descriptor(one, round), descriptor(other, round))) continue;
    return "rank " + std::to_string(one) + " called " + describe(descriptor(one, round)) + ", rank " +
           std::to_string(other) + " called " + describe(descriptor(other, round));
  }
  return "";
}

// A rank that a broadcast does not wait for is compared if it is there. Of any two ranks at least one sees the other,
// because there is a fence (in notify) between a rank's own arrival and its look at the others'.
bool SharedMemoryGroup::check_agreement(const Call& call, uint64_t round) {
  const Descriptor& own = descriptor(rank_, round);
  for (size_t rank = 0; rank < world_size_; ++rank) {
    if (call.operation == Operation::broadcast && region(rank).arrived.load(std::memory_order_acquire) < round)
      continue;
    if (is_same(own, descriptor(rank, round))) continue;
    fail(WaitStatus::mismatched, uint64_t{1} << rank, round);
    return false;
  }
  return true;
}

}  // namespace psengine

#endif  // __linux__
