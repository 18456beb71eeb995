// How ranks of a shared-memory group wait for each other, and learn of failures and of processes that have ended.
#if defined(__linux__)

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "shared_memory/call.h"
#include "shared_memory/layout.h"

namespace psengine {

constexpr int kLooksPerClock = 8;
constexpr double kWatchIntervalS = 0.1;
// Past its deadline, a wait in which nobody is missing goes on for this long, because it is about to end.
constexpr double kGraceS = 0.2;
constexpr double kShortestSleepS = 0.001;

// ---- liveness ----------------------------------------------------------------------------------------------------

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

// ---- waiting -----------------------------------------------------------------------------------------------------

static long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const struct timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// After each change of a counter. Either the sleeper sees the change when it looks a last time, or we see the sleeper.
void SharedMemoryGroup::notify() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (header().sleepers.load(std::memory_order_relaxed) == 0) return;
  header().notified_ns.store(now_ns(), std::memory_order_relaxed);
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
    const Call& call = call_at(finish_.call);
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

// The first failure stays; `round`, where ranks differ in one. The ranks of each status apart: those of a later failure
// of another kind have nothing to do with the one that is told.
void SharedMemoryGroup::fail(WaitStatus status, uint64_t ranks, uint64_t round) {
  int32_t none = 0;
  uint64_t no_round = 0;
  header().failed_ranks[static_cast<size_t>(status)].fetch_or(ranks);
  if (round != 0) header().failed_round.compare_exchange_strong(no_round, round);
  header().failure.compare_exchange_strong(none, static_cast<int32_t>(status));
  header().notifications.fetch_add(1);
  futex(&header().notifications, FUTEX_WAKE, INT_MAX, nullptr);
}

WaitResult SharedMemoryGroup::failure() const {
  if (!own_error_.empty()) throw std::runtime_error(own_error_);
  WaitResult result;
  result.status = static_cast<WaitStatus>(header().failure.load());
  result.ranks = header().failed_ranks[static_cast<size_t>(result.status)].load();
  if (result.status == WaitStatus::mismatched) result.detail = describe_difference(header().failed_round.load());
  return result;
}

bool SharedMemoryGroup::spin(uint64_t operation) {
  check_process();
  int64_t since_ns = 0;  // nothing has moved; taken at the first look that finds nothing
  int yields = 0;
  for (int looks = 1;; ++looks) {
    int64_t longest_ns;
    bool has_moved;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      has_moved = advance();
      bool is_over = first_call_ > operation;
      if (since_ns != 0 && (has_moved || is_over)) spin_length_.note_wait(now_ns() - since_ns);
      if (is_over) return true;
      if (header().failure.load(std::memory_order_acquire) != 0) return false;
      longest_ns = spin_length_.ns();
    }
    if (has_moved) {
      looks = yields = 0;
      since_ns = 0;
    } else if (!may_spin_) {
      // Ranks share cores: whoever is waited for may want this one.
      if (++yields > kYields) return false;
      sched_yield();
    } else {
      if (since_ns == 0) since_ns = now_ns();
      else if (looks % kLooksPerClock == 0 && now_ns() - since_ns >= longest_ns) return false;
      relax();
    }
  }
}

WaitResult SharedMemoryGroup::wait(uint64_t operation, double timeout_s, bool is_slice,
                                   const std::function<bool()>& is_interrupted) {
  check_process();
  int64_t started_ns = now_ns();
  while (true) {
    int64_t slept_at_ns = now_ns();
    double left_s = timeout_s - static_cast<double>(slept_at_ns - started_ns) * 1e-9;
    sleep_until_notified(operation, std::clamp(left_s, kShortestSleepS, kWatchIntervalS));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      int64_t awake_ns = now_ns(), notified_ns = header().notified_ns.load(std::memory_order_relaxed);
      bool is_notified = notified_ns > slept_at_ns;
      if (is_notified) spin_length_.note_wake_up(awake_ns - notified_ns);
      spin_length_.note_wait((is_notified ? notified_ns : awake_ns) - slept_at_ns + spin_length_.ns());
    }
    if (spin(operation)) return {};
    {
      std::lock_guard<std::mutex> lock(mutex_);
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
      else if (is_slice && left_s <= 0) return {WaitStatus::under_way, late, ""};
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

bool SharedMemoryGroup::has_ended() {
  if (header().failure.load() != 0) return true;
  for (size_t rank = 0; rank < world_size_; ++rank)
    if (region(rank).is_closed.load() != 0) return true;
  return false;
}

}  // namespace psengine

#endif  // __linux__
