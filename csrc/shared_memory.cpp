#if defined(__linux__)

#include "shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace psengine {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes share these");

// ---- the control block -------------------------------------------------------------------------------------------

constexpr uint64_t kMagic = 0x31766d68736e6570;  // the layout's name and version
constexpr size_t kCacheLineBytes = 64;
constexpr size_t kPageBytes = 4096;
// How many rounds a rank may be ahead of the slowest.
constexpr uint64_t kRingRounds = 32;
// Rounds that have a staging slot at the same time: one being filled, one summed, one emptied, one to spare.
constexpr uint64_t kSlots = 4;
constexpr size_t kMaxSegments = 64;
constexpr size_t kMaxChunks = 1024;
// A claim costs a hundred nanoseconds; this much summing takes over ten times as long.
constexpr size_t kChunkBytes = 128 * 1024;
// Up to this size every rank sums everything for itself: reading W times this is cheaper than another round trip.
constexpr size_t kSmallBytes = 16 * 1024;
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kYields = 16;
constexpr double kWatchIntervalS = 0.1;
// A process that is being killed loses its files before it counts as ended; this long is waited for the latter.
constexpr int kDyingMs = 1000;
// Past its deadline, a wait in which nobody is missing goes on for this long, because it is about to end.
constexpr double kGraceS = 0.2;
constexpr double kShortestSleepS = 0.001;

// What one rank called, as the others compare and use it.
struct alignas(kCacheLineBytes) Descriptor {
  uint64_t numel;  // elements, or bytes for operations that do not compute
  double scale;
  Operation operation;
  ScalarKind kind;
  uint32_t source_rank;
  uint32_t is_staged;
  uint32_t segment_slot;
  uint32_t segment_id;
  uint64_t offset_bytes;  // of the tensor in its segment
};

struct Segment {
  std::atomic<uint32_t> id;  // 0: none
  std::atomic<int32_t> file_descriptor;
  std::atomic<uint64_t> bytes;
};

struct alignas(kCacheLineBytes) RankRegion {
  // Written by their rank alone, read by all.
  std::atomic<uint64_t> arrived;
  std::atomic<uint64_t> finished;
  std::atomic<uint64_t> summing;   // the round of which it may hold a claimed chunk; 0: none
  std::atomic<uint64_t> releases;  // segments released so far
  std::atomic<uint32_t> is_closed;
  std::atomic<int64_t> process_id;
  alignas(kCacheLineBytes) Segment segments[kMaxSegments];
  Descriptor descriptors[kRingRounds];
};

// A round in which chunks are claimed. Each word holds the round in its upper half and a count in its lower, so that a
// word left over from the round that used this place before counts as zero.
struct alignas(kCacheLineBytes) Round {
  std::atomic<uint64_t> claimed;
  alignas(kCacheLineBytes) std::atomic<uint64_t> done;
  alignas(kCacheLineBytes) std::atomic<double> square_sums[kMaxChunks];
};

struct alignas(kPageBytes) Header {
  uint64_t magic;
  uint64_t world_size;
  uint64_t slot_bytes;
  Token token;
  alignas(kCacheLineBytes) std::atomic<uint32_t> notifications;  // the word sleepers sleep on
  std::atomic<uint32_t> sleepers;
  alignas(kCacheLineBytes) std::atomic<uint64_t> failed_ranks;
  std::atomic<uint64_t> failed_round;  // in which ranks called different operations; 0: none
  std::atomic<int32_t> failure;        // a WaitStatus; done: none
};

struct alignas(kPageBytes) SegmentHeader {
  uint64_t magic;
  uint64_t id;
  Token token;
};

static size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static size_t slots_offset(size_t world_size) {
  return round_up(sizeof(Header) + kRingRounds * sizeof(Round) + world_size * sizeof(RankRegion), kPageBytes);
}

static size_t control_bytes(size_t world_size, size_t slot_bytes) {
  return slots_offset(world_size) + world_size * kSlots * slot_bytes;
}

// ---- files and mappings ------------------------------------------------------------------------------------------

static std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

// Anonymous memory that goes when its last user goes, whatever becomes of the processes, and does not count against
// the size of /dev/shm. Sealed: a peer that shrank it would make our reads of it fatal.
static int create_anonymous_file(const char* name, size_t bytes) {
  int file_descriptor = static_cast<int>(syscall(SYS_memfd_create, name, 1U /* CLOEXEC */ | 2U /* ALLOW_SEALING */));
  if (file_descriptor < 0) throw system_error("memfd_create");
  if (ftruncate(file_descriptor, static_cast<off_t>(bytes)) != 0) {
    auto error = system_error("ftruncate of " + std::to_string(bytes) + " bytes of shared memory");
    ::close(file_descriptor);
    throw error;
  }
  constexpr int kAddSeals = 1033, kSealSeal = 1, kSealShrink = 2, kSealGrow = 4;
  fcntl(file_descriptor, kAddSeals, kSealSeal | kSealShrink | kSealGrow);  // old kernels do without
  return file_descriptor;
}

Mapping::Mapping(int file_descriptor, size_t bytes) : bytes_(bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_descriptor, 0);
  if (address == MAP_FAILED) throw system_error("mmap of " + std::to_string(bytes) + " bytes of shared memory");
  data_ = static_cast<char*>(address);
  madvise(data_, bytes, MADV_HUGEPAGE);  // where the machine offers it for shared memory
}

Mapping::Mapping(Mapping&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

// Map a file that another process made; `is_ours` looks at its first page before anything else is believed.
static Mapping map_path(const std::string& path, size_t bytes, const std::function<bool(const char*)>& is_ours) {
  int file_descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file_descriptor < 0) throw system_error("cannot open a peer's shared memory " + path);
  struct stat status {};
  if (fstat(file_descriptor, &status) != 0 || static_cast<uint64_t>(status.st_size) != bytes) {
    ::close(file_descriptor);
    throw std::runtime_error(path + " is not a peer's shared memory (expected " + std::to_string(bytes) +
                             " bytes, got " + std::to_string(status.st_size) + ")");
  }
  Mapping mapping;
  try {
    mapping = Mapping(file_descriptor, bytes);
  } catch (...) {
    ::close(file_descriptor);
    throw;
  }
  ::close(file_descriptor);
  if (!is_ours(mapping.data())) throw std::runtime_error(path + " is not this group's shared memory");
  return mapping;
}

// ---- operations --------------------------------------------------------------------------------------------------

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
  bool wants_square_sum = false;
  uint32_t segment_slot = 0;
  const char* segment = nullptr;  // where the tensor's own segment begins, if it is not staged
  uint64_t first_round = 0;
  uint64_t rounds = 1;
  uint64_t numel_per_round = 0;
  double square_sum = 0.0;

  bool has_chunks() const { return operation == Operation::all_reduce && !is_summed_by_all; }
  uint64_t begin_of(uint64_t round) const { return (round - first_round) * numel_per_round; }
  uint64_t numel_of(uint64_t round) const { return std::min(numel_per_round, numel - begin_of(round)); }
  uint64_t chunk_numel(uint64_t round) const {
    // A multiple of 64, so that chunks begin at cache lines and sums of squares have the same lanes.
    uint64_t fitting = (numel_of(round) + kMaxChunks - 1) / kMaxChunks;
    return round_up(std::max<uint64_t>(kChunkBytes / element_bytes, fitting), 64);
  }
  uint64_t chunks(uint64_t round) const { return (numel_of(round) + chunk_numel(round) - 1) / chunk_numel(round); }
};

SharedMemoryGroup::Call& SharedMemoryGroup::call_at(uint64_t number) { return calls_[number - first_call_]; }

RankRegion& SharedMemoryGroup::region(size_t rank) const {
  auto* regions = reinterpret_cast<RankRegion*>(control_.data() + sizeof(Header) + kRingRounds * sizeof(Round));
  return regions[rank];
}

Round& SharedMemoryGroup::round_state(uint64_t round) const {
  return reinterpret_cast<Round*>(control_.data() + sizeof(Header))[round % kRingRounds];
}

Descriptor& SharedMemoryGroup::descriptor(size_t rank, uint64_t round) const {
  return region(rank).descriptors[round % kRingRounds];
}

char* SharedMemoryGroup::slot(size_t rank, uint64_t round) const {
  return control_.data() + slots_offset(world_size_) + (rank * kSlots + round % kSlots) * slot_bytes_;
}

Header& SharedMemoryGroup::header() const { return *reinterpret_cast<Header*>(control_.data()); }

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
    Mapping mapping(file_descriptor, sizeof(Header));
    auto* header = reinterpret_cast<Header*>(mapping.data());
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
    const auto* found = reinterpret_cast<const Header*>(page);
    return bytes >= sizeof(Header) && found->magic == kMagic && found->token == token &&
           found->world_size == world_size && bytes == control_bytes(world_size, found->slot_bytes);
  });
  slot_bytes_ = header().slot_bytes;
  may_spin_ = has_core_for_each(world_size);
  own_segments_.assign(kMaxSegments, nullptr);
  region(rank).process_id.store(process_id_);
}

void SharedMemoryGroup::watch_peers() {
  for (size_t rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    auto process_id = static_cast<pid_t>(region(rank).process_id.load());
    if (process_id <= 0) throw std::runtime_error("rank " + std::to_string(rank) + " has not joined");
    // Held open, so that another process that gets the same id later is not mistaken for this one.
    peers_[rank].process_fd = static_cast<int>(syscall(434 /* pidfd_open */, process_id, 0));
    if (!is_running(rank)) throw std::runtime_error("rank " + std::to_string(rank) + " cannot be seen from here");
  }
}

// Whether a rank's process still runs, or at least has not ended within `patience_ms`.
bool SharedMemoryGroup::is_running(size_t rank, int patience_ms) const {
  if (rank == rank_) return true;
  int process_fd = peers_[rank].process_fd;
  if (process_fd >= 0) {
    struct pollfd status = {process_fd, POLLIN, 0};
    // Readable once the process has ended, reaped or not. A signal makes poll fail, which says nothing of the peer.
    return poll(&status, 1, patience_ms) <= 0 || (status.revents & POLLIN) == 0;
  }
  // Kernels before 5.3: a zombie still answers signals, so its state is read (man 5 proc).
  char path[64];
  auto process_id = static_cast<long>(region(rank).process_id.load());
  std::snprintf(path, sizeof(path), "/proc/%ld/stat", process_id);
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "r"), &std::fclose);
  if (!file) return kill(static_cast<pid_t>(process_id), 0) == 0;
  char text[1024];
  size_t length = std::fread(text, 1, sizeof(text) - 1, file.get());
  text[length] = '\0';
  const char* name_end = std::strrchr(text, ')');
  return name_end != nullptr && name_end[1] == ' ' && std::strchr("ZX", name_end[2]) == nullptr;
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

bool SharedMemoryGroup::advance() {
  bool has_moved = false;
  try {
    // After a failure nobody enters another round, but one that all had entered still ends, on every rank alike:
    // whether an operation succeeds must not depend on who looked before the failure and who after.
    while (own_error_.empty()) {
      bool may_enter = header().failure.load(std::memory_order_acquire) == 0;
      if (!((may_enter && enter_rounds()) | reduce_rounds() | finish_rounds())) break;
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

// ---- waiting -----------------------------------------------------------------------------------------------------

static long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const struct timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// After each change of a counter. Either the sleeper sees the change when it looks a last time, or we see the sleeper.
void SharedMemoryGroup::notify() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (header().sleepers.load(std::memory_order_relaxed) == 0) return;
  header().notifications.fetch_add(1);
  futex(&header().notifications, FUTEX_WAKE, INT_MAX, nullptr);
}

static void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void SharedMemoryGroup::sleep_until_notified(uint64_t operation, double longest_s) {
  uint32_t seen = header().notifications.load();
  header().sleepers.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool is_over;
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    is_over = advance() || first_call_ > operation;  // another thread of this rank may have completed it
  } catch (...) {
    header().sleepers.fetch_sub(1);
    throw;
  }
  if (!is_over && header().failure.load() == 0) {
    struct timespec timeout {};
    timeout.tv_sec = static_cast<time_t>(longest_s);
    timeout.tv_nsec = static_cast<long>((longest_s - std::floor(longest_s)) * 1e9);
    futex(&header().notifications, FUTEX_WAIT, seen, &timeout);
  }
  header().sleepers.fetch_sub(1);
}

// The ranks that keep this rank's first unfinished round from going on.
uint64_t SharedMemoryGroup::ranks_waited_for() const {
  uint64_t ranks = 0;
  if (finish_.round >= next_round_) return 0;
  for (size_t rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) continue;
    const RankRegion& other = region(rank);
    const Call& call = calls_[finish_.call - first_call_];
    bool is_needed = call.operation != Operation::broadcast || rank == call.source_rank;
    bool is_behind = is_needed && other.arrived.load() < finish_.round;
    if (finish_.round == enter_.round) {
      // Not entered yet: a place is missing, which those hold who have not finished an old round.
      uint64_t reused_after = call.is_staged ? kSlots : kRingRounds;
      is_behind = enter_.round > reused_after && other.finished.load() < enter_.round - reused_after;
    } else if (call.has_chunks() && have_arrived(call, finish_.round)) {
      is_behind = other.summing.load() == finish_.round;  // it holds the chunk that is missing
    }
    if (is_behind) ranks |= uint64_t{1} << rank;
  }
  return ranks;
}

// The first failure stays; `round`, where ranks differ in one.
void SharedMemoryGroup::fail(WaitStatus status, uint64_t ranks, uint64_t round) {
  int32_t none = 0;
  uint64_t no_round = 0;
  header().failed_ranks.fetch_or(ranks);
  if (round != 0) header().failed_round.compare_exchange_strong(no_round, round);
  header().failure.compare_exchange_strong(none, static_cast<int32_t>(status));
  header().notifications.fetch_add(1);
  futex(&header().notifications, FUTEX_WAKE, INT_MAX, nullptr);
}

WaitResult SharedMemoryGroup::failure() const {
  if (!own_error_.empty()) throw std::runtime_error(own_error_);
  WaitResult result;
  result.status = static_cast<WaitStatus>(header().failure.load());
  result.ranks = header().failed_ranks.load();
  if (result.status == WaitStatus::mismatched) result.detail = describe_difference(header().failed_round.load());
  return result;
}

WaitResult SharedMemoryGroup::wait(uint64_t operation, double timeout_s, const std::function<bool()>& is_interrupted) {
  check_process();
  using Clock = std::chrono::steady_clock;
  auto started = Clock::now();
  auto last_moved = started;
  int yields = 0;
  while (true) {
    bool has_moved;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      has_moved = advance();
      if (first_call_ > operation) return {};
      if (header().failure.load() != 0) return failure();
    }
    auto now = Clock::now();
    if (has_moved) {
      last_moved = now;
      yields = 0;
      continue;
    }
    if (may_spin_ && now - last_moved < kSpinTime) {
      for (int pause = 0; pause < 8; ++pause) relax();
      continue;
    }
    if (yields < kYields) {
      ++yields;
      sched_yield();
      continue;
    }
    double left_s = timeout_s - std::chrono::duration<double>(now - started).count();
    sleep_until_notified(operation, std::clamp(left_s, kShortestSleepS, kWatchIntervalS));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      advance();
      if (first_call_ > operation) return {};
      if (header().failure.load() != 0) return failure();
      uint64_t late = ranks_waited_for(), gone = 0, closed = 0;
      for (size_t rank = 0; rank < world_size_; ++rank) {
        if ((late >> rank & 1) == 0) continue;
        if (!is_running(rank)) gone |= uint64_t{1} << rank;
        else if (region(rank).is_closed.load() != 0) closed |= uint64_t{1} << rank;
      }
      // Once more: a rank may have done its part between our look at it and its leaving.
      late &= ranks_waited_for();
      if ((gone & late) != 0) fail(WaitStatus::lost, gone & late);
      else if ((closed & late) != 0) fail(WaitStatus::closed, closed & late);
      else if (late != 0 ? left_s <= 0 : left_s <= -kGraceS) fail(WaitStatus::timed_out, late);
    }
    // Without our lock: it takes the interpreter's, whose holder may be waiting for ours.
    if (is_interrupted()) return {WaitStatus::interrupted, 0, ""};
  }
}

std::vector<RankState> SharedMemoryGroup::states() const {
  std::vector<RankState> states;
  for (size_t rank = 0; rank < world_size_; ++rank) {
    const RankRegion& other = region(rank);
    states.push_back({other.process_id.load(), other.arrived.load(), other.finished.load(),
                      other.is_closed.load() != 0, is_running(rank)});
  }
  return states;
}

}  // namespace psengine

#endif  // __linux__
