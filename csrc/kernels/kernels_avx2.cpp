// The kernels for x86-64 processors with AVX2 and FMA.
#include "kernels/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// From here to the end of the file; kernels.inl says why no header may follow. Not popped: templates are instantiated
// at the end of the file.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma")
#endif

#define PSENGINE_VECTOR_BYTES 32
#define PSENGINE_F16C
#define PSENGINE_FMA

namespace psengine {
namespace {
#include "kernels/kernels.inl"
}  // namespace

const Kernels avx2_kernels = PSENGINE_TABLE("avx2");

}  // namespace psengine

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
