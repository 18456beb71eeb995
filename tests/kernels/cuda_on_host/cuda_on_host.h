// CUDA for the host, as far as csrc/kernels/*_cuda.cu use it: g++ compiles their kernels as they are.
//
// A launch runs at once, one block after the other, and one thread until it ends or waits: at __syncthreads for the
// block, at a shuffle or ballot for its warp. A thread that waits keeps its fiber (ucontext), and the next one runs on
// another. In each round threads go on in the order of their numbers or backwards, by chance, so that what relies on an
// order gives other values. The program ends with a message where a thread ends while others wait for it.
//
// Memory of the device is memory of the host: AddressSanitizer sees each access beyond it, UndefinedBehaviorSanitizer
// each that is not aligned. Not modelled: memory visibility, and blocks that run at the same time.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

// After all headers of the standard library, which use some of these names.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__ &  // written between a type and its name
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time
#define __builtin_assume(condition) static_cast<void>(0)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
};

inline dim3 threadIdx, blockIdx;

// ---- threads

namespace cuda_on_host {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;

[[noreturn]] inline void refuse(const char* what) {
  std::fprintf(stderr, "cuda_on_host: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::abort();
}

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
};

struct Thread {
  Fiber* fiber;                      // while it waits
  bool has_ended;
  unsigned barriers, warp_meetings;  // how many it has come to
  bool waits_for_block;              // at its last barrier
  unsigned waits_for;                // lanes of its warp that must come to its last meeting
  // What it brought to its last two meetings. Nobody is two ahead of anybody.
  alignas(8) char brought[2][8];
};

inline std::vector<Thread> threads;
inline size_t started_count;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Fiber*> free_fibers;
inline Fiber* running;
inline ucontext_t scheduler;
inline const std::function<void()>* thread_body;
inline bool is_backwards;

inline void draw_order() {
  static uint64_t chance = 1;
  chance = chance * 6364136223846793005u + 1442695040888963407u;
  is_backwards = chance >> 63 != 0;
}

inline unsigned in_order(size_t i) { return unsigned(is_backwards ? threads.size() - 1 - i : i); }

inline Thread& current() { return threads[threadIdx.x]; }

// Of one fiber: the next threads, until one waits.
inline void run_threads() {
  while (started_count < threads.size()) {
    threadIdx.x = in_order(started_count++);
    (*thread_body)();
    current().has_ended = true;
  }
  free_fibers.push_back(running);  // uc_link leads to the scheduler
}

inline void wait() {
  current().fiber = running;
  swapcontext(&running->context, &scheduler);
}

// Whether what this thread waits for is complete.
inline bool may_go_on(unsigned number) {
  const Thread& thread = threads[number];
  if (thread.waits_for_block) {
    for (const Thread& other : threads) {
      if (other.barriers >= thread.barriers) continue;
      if (other.has_ended) refuse("a thread ended while others wait for it at __syncthreads");
      return false;
    }
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((thread.waits_for >> lane & 1) == 0) continue;
    const Thread& other = threads[number / kWarp * kWarp + lane];
    if (other.warp_meetings >= thread.warp_meetings) continue;
    if (other.has_ended) refuse("a thread ended while its warp waits for it");
    return false;
  }
  return true;
}

inline void resume(Fiber* fiber) {
  running = fiber;
  swapcontext(&scheduler, &fiber->context);
}

inline void start_fiber() {
  if (free_fibers.empty()) free_fibers.push_back(fibers.emplace_back(new Fiber).get());
  Fiber* const fiber = free_fibers.back();
  free_fibers.pop_back();
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = &scheduler;
  makecontext(&fiber->context, run_threads, 0);
  resume(fiber);
}

inline void run_block(unsigned thread_count) {
  threads.assign(thread_count, Thread{});
  started_count = 0;
  draw_order();
  while (started_count < thread_count) start_fiber();
  for (bool are_waiting = true; are_waiting;) {
    draw_order();
    are_waiting = false;
    bool has_moved = false;
    for (unsigned i = 0; i < thread_count; ++i) {
      threadIdx.x = in_order(i);
      Thread& thread = current();
      if (thread.has_ended) continue;
      are_waiting = true;
      if (!may_go_on(threadIdx.x)) continue;
      has_moved = true;
      thread.waits_for_block = false;
      thread.waits_for = 0;
      resume(thread.fiber);
    }
    if (are_waiting && !has_moved) refuse("all threads wait: some at __syncthreads, others for their warp");
  }
}

// What every lane of the warp brought. `mask` names the lanes that come; a lane that does not has no value.
template <class Value>
std::array<Value, kWarp> meet(unsigned mask, Value value) {
  static_assert(sizeof(Value) <= 8);
  Thread& thread = current();
  if ((mask >> threadIdx.x % kWarp & 1) == 0) refuse("a lane that the mask does not name");
  const unsigned number = ++thread.warp_meetings;
  std::memcpy(thread.brought[number % 2], &value, sizeof(value));
  thread.waits_for = mask;
  wait();
  std::array<Value, kWarp> values{};
  for (unsigned lane = 0; lane < kWarp; ++lane)
    if ((mask >> lane & 1) != 0)
      std::memcpy(&values[lane], threads[threadIdx.x / kWarp * kWarp + lane].brought[number % 2], sizeof(Value));
  return values;
}

// ---- floats of 16 bits, by arithmetic alone, unlike csrc/kernels/kernels.inl

// Rounded to the nearest, ties to even.
template <int fraction_bits, int bias>
uint16_t narrow(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int64_t infinity = int64_t(2 * bias + 1) << fraction_bits;
  if (std::isnan(value)) return uint16_t(sign | infinity | 1 << (fraction_bits - 1));
  if (std::isinf(value)) return uint16_t(sign | infinity);
  const int exponent = value == 0 ? 1 - bias : std::max(1 - bias, std::ilogb(value));
  const double units = std::nearbyint(std::ldexp(std::fabs(double(value)), fraction_bits - exponent));
  // From subnormal numbers to normal ones, and from one exponent to the next, the bits count on.
  const int64_t bits = (int64_t(exponent + bias - 1) << fraction_bits) + int64_t(units);
  return uint16_t(sign | std::min(bits, infinity));
}

template <int fraction_bits, int bias>
float widen(uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
  double magnitude = std::ldexp(fraction + (exponent > 0 ? 1 << fraction_bits : 0),
                                std::max(exponent, 1) - bias - fraction_bits);
  if (exponent == 2 * bias + 1)
    magnitude = fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  return float((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace cuda_on_host

// ---- what kernels call

inline void __syncthreads() {
  cuda_on_host::current().barriers += 1;
  cuda_on_host::current().waits_for_block = true;
  cuda_on_host::wait();
}

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lanes) {
  return cuda_on_host::meet(mask, value)[(threadIdx.x % cuda_on_host::kWarp) ^ unsigned(lanes)];
}

template <class Value>
Value __shfl_down_sync(unsigned mask, Value value, int distance) {
  const unsigned lane = threadIdx.x % cuda_on_host::kWarp, from = lane + unsigned(distance);
  return cuda_on_host::meet(mask, value)[from < cuda_on_host::kWarp ? from : lane];
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto predicates = cuda_on_host::meet(mask, predicate);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < cuda_on_host::kWarp; ++lane) ballot |= unsigned(predicates[lane] != 0) << lane;
  return ballot;
}

struct alignas(2) __half {
  uint16_t bits;
};
struct alignas(2) __nv_bfloat16 {
  uint16_t bits;
};

inline __half __float2half_rn(float value) { return {cuda_on_host::narrow<10, 15>(value)}; }
inline float __half2float(__half value) { return cuda_on_host::widen<10, 15>(value.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {cuda_on_host::narrow<7, 127>(value)}; }
inline float __bfloat162float(__nv_bfloat16 value) { return cuda_on_host::widen<7, 127>(value.bits); }
inline float __double2float_rn(double value) { return float(value); }
inline uint32_t __float_as_uint(float value) { return cuda_on_host::bits_as<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return cuda_on_host::bits_as<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
using std::isfinite;
using std::max;
using std::min;

// ---- what launches them

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* configuration, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const unsigned blocks = configuration->gridDim.x, threads = configuration->blockDim.x;
  const size_t parameter_bytes = (sizeof(Parameters) + ... + 0);
  if (blocks == 0 || blocks > INT32_MAX || threads == 0 || threads > 1024 || parameter_bytes > 32764)
    return cudaErrorInvalidConfiguration;
  const std::function<void()> body = [&] { kernel(arguments...); };
  cuda_on_host::thread_body = &body;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) cuda_on_host::run_block(threads);
  return cudaSuccess;
}
