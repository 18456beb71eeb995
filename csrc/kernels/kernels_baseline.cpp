// The kernels for every processor of the target architecture.
#include "kernels/kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define PSENGINE_VECTOR_BYTES 16
#if defined(__aarch64__)
#define PSENGINE_FMA
#endif

namespace psengine {
namespace {
#include "kernels/kernels.inl"
}  // namespace

const Kernels baseline_kernels = PSENGINE_TABLE("baseline");

}  // namespace psengine
