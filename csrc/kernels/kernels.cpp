// Which table of kernels this processor runs.
#include "kernels/kernels.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define PSENGINE_X86 1
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace psengine {

namespace {

#if PSENGINE_X86
// Not every compiler's __builtin_cpu_supports knows "f16c".
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const Kernels* best() {
#if PSENGINE_X86
  if (has_avx512()) return &avx512_kernels;
  if (has_avx2()) return &avx2_kernels;
#endif
  return &baseline_kernels;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = in_use.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = best();
    in_use.store(table, std::memory_order_release);
  }
  return *table;
}

void finish_streaming() {
#if PSENGINE_X86
  _mm_sfence();
#endif
}

bool use_kernels(const char* name) {
  const Kernels* table = nullptr;
  if (std::strcmp(name, "baseline") == 0) table = &baseline_kernels;
#if PSENGINE_X86
  if (std::strcmp(name, "avx2") == 0 && has_avx2()) table = &avx2_kernels;
  if (std::strcmp(name, "avx512") == 0 && has_avx512()) table = &avx512_kernels;
#endif
  if (table == nullptr) return false;
  in_use.store(table, std::memory_order_release);
  return true;
}

}  // namespace psengine
