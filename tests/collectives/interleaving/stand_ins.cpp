// What lies below the engine's sources while they are explored: the functions that a compiler calls for each access to
// memory under -fsanitize=thread, the system calls, the mappings, and the summing.

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "arena.h"
#include "explorer.h"
#include "kernels/kernels.h"
#include "shared_memory/mapping.h"

namespace check {

// ---- the arena ---------------------------------------------------------------------------------------------------

alignas(4096) static char shared[kSharedBytes];
alignas(64) static char own[kOwnBytes];
static size_t shared_used = 0, own_used = 0, kept_shared = 0, kept_own = 0;
static std::vector<char> kept;
static bool in_program = false;
struct File {
  char* memory;
  size_t bytes;
};
static std::array<File, 16> files;
static size_t file_count = 0;
size_t rank_of_setup = 0;

char* shared_begin() { return shared; }
size_t shared_bytes_in_use() { return shared_used; }

char* allocate_shared(size_t bytes) {
  char* memory = shared + shared_used;
  shared_used += (bytes + 4095) / 4096 * 4096;
  if (shared_used > kSharedBytes) std::abort();
  return memory;
}

void clear_arena() {
  std::memset(shared, 0, shared_used);
  shared_used = own_used = 0;
  file_count = 0;
}

void keep_arena() {
  kept_shared = shared_used;
  kept_own = own_used;
  kept.assign(shared, shared + kept_shared);
  kept.insert(kept.end(), own, own + kept_own);
}

void restore_arena() {
  std::memcpy(shared, kept.data(), kept_shared);
  std::memcpy(own, kept.data() + kept_shared, kept_own);
  own_used = kept_own;
}

InProgram::InProgram(bool is_in) : was_in_(in_program) { in_program = is_in; }
InProgram::~InProgram() { in_program = was_in_; }

int make_file(char* memory, size_t bytes) {
  files.at(file_count++) = {memory, bytes};
  return static_cast<int>(file_count) + 100;
}

// ---- accesses ----------------------------------------------------------------------------------------------------

uintptr_t unexplored_word = 0;

static bool is_explored(const volatile void* address) {
  auto place = reinterpret_cast<uintptr_t>(address);
  return explorer().is_in_thread() && explorer().memory.is_watched(place) && place != unexplored_word;
}

static Step step_of(Kind kind, const volatile void* address, size_t bytes, int order, uintptr_t site) {
  Step step;
  step.kind = kind;
  step.word = explorer().memory.word_at(reinterpret_cast<uintptr_t>(address), bytes);
  step.order = step.failure_order = order;
  step.site = site;
  return step;
}

static void plain(const volatile void* address, size_t bytes, bool is_write, uintptr_t site) {
  if (!is_explored(address)) return;
  InProgram outside(false);
  explorer().plain(reinterpret_cast<uintptr_t>(address), bytes, is_write, site);
}

template <typename T>
static T load(const volatile T* address, int order, uintptr_t site) {
  if (!is_explored(address)) return __atomic_load_n(address, __ATOMIC_SEQ_CST);
  InProgram outside(false);
  return static_cast<T>(explorer().perform(step_of(Kind::load, address, sizeof(T), order, site)));
}

template <typename T>
static void store(volatile T* address, T value, int order, uintptr_t site) {
  if (!is_explored(address)) return __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
  InProgram outside(false);
  Step step = step_of(Kind::store, address, sizeof(T), order, site);
  step.operand = value;
  explorer().perform(step);
}

template <typename T>
static T modify(Modify how, volatile T* address, T operand, int order, uintptr_t site) {
  if (!is_explored(address)) {
    switch (how) {
      case Modify::add: return __atomic_fetch_add(address, operand, __ATOMIC_SEQ_CST);
      case Modify::subtract: return __atomic_fetch_sub(address, operand, __ATOMIC_SEQ_CST);
      case Modify::bit_or: return __atomic_fetch_or(address, operand, __ATOMIC_SEQ_CST);
      default: return __atomic_exchange_n(address, operand, __ATOMIC_SEQ_CST);
    }
  }
  InProgram outside(false);
  Step step = step_of(Kind::modify, address, sizeof(T), order, site);
  step.modify = how;
  step.operand = operand;
  return static_cast<T>(explorer().perform(step));
}

// A weak exchange that fails without a reason is not explored: its loop looks again, and sees what it saw.
template <typename T>
static int compare(volatile T* address, T* expected, T value, int order, int failure_order, uintptr_t site) {
  if (!is_explored(address))
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  InProgram outside(false);
  Step step = step_of(Kind::modify, address, sizeof(T), order, site);
  step.modify = Modify::compare;
  step.operand = value;
  step.expected = *expected;
  step.failure_order = failure_order;
  T found = static_cast<T>(explorer().perform(step));
  bool is_equal = found == *expected;
  *expected = found;
  return is_equal;
}

}  // namespace check

using check::Modify;

#define SITE reinterpret_cast<uintptr_t>(__builtin_return_address(0))

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define PLAIN(bytes)                                                                     \
  void __tsan_read##bytes(void* address) { check::plain(address, bytes, false, SITE); }  \
  void __tsan_write##bytes(void* address) { check::plain(address, bytes, true, SITE); }  \
  void __tsan_unaligned_read##bytes(void* address) { check::plain(address, bytes, false, SITE); } \
  void __tsan_unaligned_write##bytes(void* address) { check::plain(address, bytes, true, SITE); }
PLAIN(1) PLAIN(2) PLAIN(4) PLAIN(8) PLAIN(16)
void __tsan_read_range(void* address, size_t bytes) { check::plain(address, bytes, false, SITE); }
void __tsan_write_range(void* address, size_t bytes) { check::plain(address, bytes, true, SITE); }

#define ATOMIC(bits, T)                                                                                              \
  T __tsan_atomic##bits##_load(const volatile T* a, int order) { return check::load(a, order, SITE); }               \
  void __tsan_atomic##bits##_store(volatile T* a, T value, int order) { check::store(a, value, order, SITE); }       \
  T __tsan_atomic##bits##_exchange(volatile T* a, T value, int order) {                                              \
    return check::modify(Modify::exchange, a, value, order, SITE);                                                   \
  }                                                                                                                  \
  T __tsan_atomic##bits##_fetch_add(volatile T* a, T value, int order) {                                             \
    return check::modify(Modify::add, a, value, order, SITE);                                                        \
  }                                                                                                                  \
  T __tsan_atomic##bits##_fetch_sub(volatile T* a, T value, int order) {                                             \
    return check::modify(Modify::subtract, a, value, order, SITE);                                                   \
  }                                                                                                                  \
  T __tsan_atomic##bits##_fetch_or(volatile T* a, T value, int order) {                                              \
    return check::modify(Modify::bit_or, a, value, order, SITE);                                                     \
  }                                                                                                                  \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* a, T* expected, T value, int order, int failure) {   \
    return check::compare(a, expected, value, order, failure, SITE);                                                 \
  }                                                                                                                  \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* a, T* expected, T value, int order, int failure) {     \
    return check::compare(a, expected, value, order, failure, SITE);                                                 \
  }
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)

void __tsan_atomic_thread_fence(int) {
  if (!check::explorer().is_in_thread()) return;
  check::InProgram outside(false);
  check::Step step;
  step.kind = check::Kind::fence;
  step.site = SITE;
  check::explorer().perform(step);
}

void* __real_memcpy(void*, const void*, size_t);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  check::plain(from, bytes, false, SITE);
  check::plain(to, bytes, true, SITE);
  return __real_memcpy(to, from, bytes);
}

// ---- the system --------------------------------------------------------------------------------------------------

static size_t current_rank() {
  return check::explorer().is_in_thread() ? check::explorer().running().rank : check::rank_of_setup;
}

int __wrap_getpid() { return static_cast<int>(check::kFirstProcess + static_cast<int64_t>(current_rank())); }

// Fewer cores than ranks, so that waiting threads yield, which is seen here.
int __wrap_sched_getaffinity(int, size_t, cpu_set_t* cores) {
  CPU_ZERO(cores);
  CPU_SET(0, cores);
  return 0;
}

int __wrap_sched_yield() {
  check::InProgram outside(false);
  // Of the looks that found nothing to do, only which values they found matters.
  check::Fiber& fiber = check::explorer().running();
  auto looked_at = fiber.looked_at;
  check::explorer().forget_history(SITE);
  fiber.looked_at = looked_at;
  check::Step step;
  step.kind = check::Kind::yield;
  step.expected = fiber.history;
  step.site = SITE;
  check::explorer().perform(step);
  return 0;
}

constexpr int kFirstProcessFile = 5000;

long __wrap_syscall(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  if (number == 434) {  // pidfd_open
    long process = va_arg(arguments, int);
    va_end(arguments);
    return kFirstProcessFile + process - check::kFirstProcess;
  }
  if (number != SYS_futex) std::abort();
  auto* address = va_arg(arguments, uint32_t*);
  int operation = va_arg(arguments, int);
  auto value = va_arg(arguments, uint32_t);
  va_end(arguments);
  check::InProgram outside(false);
  size_t word = check::explorer().memory.word_at(reinterpret_cast<uintptr_t>(address), sizeof(uint32_t));
  if (operation == FUTEX_WAKE) {
    check::explorer().wake(word);
  } else {
    check::explorer().forget_history(SITE);
    check::Step step;
    step.kind = check::Kind::sleep;
    step.word = word;
    step.expected = value;
    step.site = SITE;
    check::explorer().perform(step);
  }
  return 0;
}

static bool has_ended(size_t rank, uintptr_t site);

// Only of files that watch a process: readable once it has ended.
int __wrap_poll(struct pollfd* polled, nfds_t, int) {
  bool is_ended = has_ended(static_cast<size_t>(polled->fd - kFirstProcessFile), SITE);
  polled->revents = is_ended ? POLLIN : 0;
  return is_ended ? 1 : 0;
}

int __real_pthread_mutex_lock(pthread_mutex_t*);
int __real_pthread_mutex_unlock(pthread_mutex_t*);

// A lock that one thread alone takes is no step.
int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (!check::explorer().is_in_thread() || !check::explorer().has_threads(current_rank())) return 0;
  check::InProgram outside(false);
  check::Step step;
  step.kind = check::Kind::lock;
  step.operand = reinterpret_cast<uintptr_t>(mutex);
  step.site = SITE;
  check::explorer().lock(step);
  return 0;
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  if (!check::explorer().is_in_thread() || !check::explorer().has_threads(current_rank())) return 0;
  check::InProgram outside(false);
  check::explorer().unlock(reinterpret_cast<uintptr_t>(mutex));
  return 0;
}

// std::chrono::steady_clock::now: each thread's own time, which goes on in its sleeps alone.
std::chrono::steady_clock::time_point __wrap__ZNSt6chrono3_V212steady_clock3nowEv() {
  int64_t now_ns = check::explorer().is_in_thread() ? check::explorer().running().now_ns : 0;
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(1 + now_ns));
}

}  // extern "C"

static uint64_t* ended_word(size_t rank) { return reinterpret_cast<uint64_t*>(check::shared_begin()) + rank; }

static bool has_ended(size_t rank, uintptr_t site) {
  return check::load(ended_word(rank), __ATOMIC_ACQUIRE, site) != 0;
}

// ---- allocations -------------------------------------------------------------------------------------------------

void* operator new(size_t bytes) {
  if (!check::in_program) {
    void* memory = std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  char* memory = check::own + check::own_used;
  check::own_used += (bytes + 63) / 64 * 64;
  if (check::own_used > check::kOwnBytes) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept {
  auto* address = static_cast<char*>(memory);
  if (address < check::own || address >= check::own + check::kOwnBytes) std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

// ---- in place of csrc/shared_memory/mapping.cpp and csrc/kernels -------------------------------------------------

namespace psengine {

std::runtime_error system_error(const std::string& what) { return std::runtime_error(what); }

Mapping::Mapping(int file_descriptor, size_t bytes)
    : data_(check::files.at(static_cast<size_t>(file_descriptor) - 101).memory), bytes_(bytes) {}
Mapping::Mapping(Mapping&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
Mapping::~Mapping() {}

// The files of a process go with it.
Mapping map_path(const std::string& path, size_t bytes, const std::function<bool(const char*)>& is_ours) {
  long process = 0;
  int file_descriptor = 0;
  if (std::sscanf(path.c_str(), "/proc/%ld/fd/%d", &process, &file_descriptor) != 2) std::abort();
  auto rank = static_cast<size_t>(process - check::kFirstProcess);
  if (has_ended(rank, SITE)) throw std::runtime_error(path + " cannot be opened");
  Mapping mapping(file_descriptor, bytes);
  if (!is_ours(mapping.data())) throw std::runtime_error(path + " is not this group's shared memory");
  return mapping;
}

namespace {

void sum(void* const* destinations, size_t destination_count, const void* const* sources, size_t source_count,
         ScalarKind, size_t numel, double, bool) {
  for (size_t i = 0; i < numel; ++i) {
    double total = 0;
    for (size_t source = 0; source < source_count; ++source) {
      const double* values = static_cast<const double*>(sources[source]) + i;
      check::plain(values, sizeof(double), false, SITE);
      total += *values;
    }
    for (size_t destination = 0; destination < destination_count; ++destination) {
      double* values = static_cast<double*>(destinations[destination]) + i;
      check::plain(values, sizeof(double), true, SITE);
      *values = total;
    }
  }
}

}  // namespace

const Kernels& kernels() {
  static Kernels table = [] {
    Kernels made{};
    made.name = "explored";
    made.sum = sum;
    return made;
  }();
  return table;
}

}  // namespace psengine
