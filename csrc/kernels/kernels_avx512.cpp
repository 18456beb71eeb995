// The kernels for x86-64 processors with AVX-512 as in Skylake-SP and Zen 4.
#include "kernels/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// From here to the end of the file; kernels.inl says why no header may follow. Not popped: templates are instantiated
// at the end of the file.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,avx2,fma")
#endif

#define PSENGINE_VECTOR_BYTES 64
#define PSENGINE_F16C
#define PSENGINE_FMA
#define PSENGINE_AVX512

namespace psengine {
namespace {
#include "kernels/kernels.inl"
}  // namespace

const Kernels avx512_kernels = PSENGINE_TABLE("avx512");

}  // namespace psengine

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
