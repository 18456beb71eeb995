// The operators of codecs on CUDA: a block of threads for a block of values (fp4: a warp), with the bits of codecs.inl.
//
// Products and sums are never contracted (--fmad=false), and subnormals are kept (no --use_fast_math). "topk" has no
// operator here: codec_ops.py runs its reference, which sorts.
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda.h"

namespace psengine {
namespace {

constexpr unsigned kWholeWarp = 0xffffffff;
constexpr int kFp4Warps = 8;  // of a block of threads
// See codecs.inl.
constexpr uint32_t kLargest = 0x7f400000;
constexpr uint32_t kQuietNan = 0x7fc00000;
constexpr uint32_t kOne = 0x3f800000;
constexpr uint32_t kSign = 0x80000000;
constexpr float kSmallestLargest = 127 * 1.17549435e-38f;
constexpr float kRounder = 12582912.0f;

// What is encoded; 0 behind the last value.
__device__ float value_at(const Encoding& encoding, int64_t i) {
  if (i >= encoding.numel) return 0.0f;
  return encoding.residual == nullptr ? encoding.values[i] : __fadd_rn(encoding.values[i], encoding.residual[i]);
}

__device__ void keep(const Encoding& encoding, int64_t i, float left_out) {
  if (encoding.next != nullptr && i < encoding.numel) encoding.next[i] = left_out;
}

__device__ void write(const Decoding& decoding, int64_t i, float value) {
  if (i < decoding.numel) decoding.into[i] = decoding.adds ? __fadd_rn(decoding.into[i], value) : value;
}

__device__ uint32_t magnitude_of(float value) { return __float_as_uint(value) & ~kSign; }

__device__ uint32_t largest_of_warp(uint32_t bits) {
  for (int width = 16; width > 0; width /= 2) bits = max(bits, __shfl_xor_sync(kWholeWarp, bits, width));
  return bits;
}

// A payload may begin at any byte.
__device__ void write_scale(uint8_t* to, float scale) {
  const uint32_t bits = __float_as_uint(scale);
  for (int i = 0; i < 4; ++i) to[i] = uint8_t(bits >> (8 * i));
}

__device__ float read_scale(const uint8_t* from) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= uint32_t(from[i]) << (8 * i);
  return __uint_as_float(bits);
}

// ---- int8: 256 threads

__global__ void encode_int8(Encoding encoding) {
  __shared__ uint32_t largest_of[8];
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  const float value = value_at(encoding, i);
  const uint32_t of_warp = largest_of_warp(magnitude_of(value));
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = of_warp;
  __syncthreads();
  uint32_t bits = 0;
  for (int warp = 0; warp < 8; ++warp) bits = max(bits, largest_of[warp]);
  const float largest = __uint_as_float(bits);
  const bool is_finite = bits <= kLargest;
  const bool is_large = is_finite && largest >= kSmallestLargest;
  const float scale =
      is_finite ? (is_large ? __fdiv_rn(largest, 127.0f) : 0.0f) : __uint_as_float(kQuietNan);
  const float inverse = is_large ? __fdiv_rn(127.0f, largest) : 0.0f;
  const float rounded = is_finite ? __fadd_rn(__fmul_rn(value, inverse), kRounder) : kRounder;
  uint8_t* const block = encoding.payload + int64_t(blockIdx.x) * 260;
  if (threadIdx.x == 0) write_scale(block, scale);
  block[4 + threadIdx.x] = uint8_t(__float_as_uint(rounded));
  const float decoded = __fmul_rn(__fsub_rn(rounded, kRounder), scale);
  keep(encoding, i, is_finite ? __fsub_rn(value, decoded) : 0.0f);
}

__global__ void decode_int8(Decoding decoding) {
  const uint8_t* const block = decoding.payload + int64_t(blockIdx.x) * 260;
  const float code = float(int8_t(block[4 + threadIdx.x]));
  write(decoding, int64_t(blockIdx.x) * 256 + threadIdx.x, __fmul_rn(code, read_scale(block)));
}

// ---- fp4: a warp

__global__ void encode_fp4(Encoding encoding) {
  const int64_t block_index = int64_t(blockIdx.x) * kFp4Warps + threadIdx.x / 32;
  const int64_t first = block_index * 32;
  if (first >= encoding.numel) return;  // the whole warp
  const int lane = threadIdx.x % 32;
  const float value = value_at(encoding, first + lane);
  const uint32_t bits = largest_of_warp(magnitude_of(value));
  const bool is_finite = bits <= kLargest;
  const int32_t wanted = int32_t(bits >> 23) - 2 + ((bits & 0x7fffff) > 0x400000);
  const uint32_t exponent = is_finite ? uint32_t(max(wanted, 1)) : 255;
  const uint32_t inverse = is_finite ? (254 - exponent) << 23 : 0;
  const uint32_t magnitude = magnitude_of(__fmul_rn(value, __uint_as_float(inverse)));
  // The rounding is explained in codecs.inl.
  const uint32_t power = max(magnitude, kOne) & 0x7f800000;
  const uint32_t rounder = power + (22u << 23);
  const float rounded = __fadd_rn(__uint_as_float(magnitude), __uint_as_float(rounder));
  const uint32_t sign = __float_as_uint(value) & kSign;
  uint32_t code = __float_as_uint(rounded) - rounder + ((power - kOne) >> 22);
  code = is_finite ? code | sign >> 28 : 0;
  const uint32_t upper = __shfl_down_sync(kWholeWarp, code, 16);
  uint8_t* const block = encoding.payload + block_index * 17;
  if (lane == 0) block[0] = uint8_t(exponent);
  if (lane < 16) block[1 + lane] = uint8_t(code | upper << 4);
  const float decoded =
      __fmul_rn(__fsub_rn(rounded, __uint_as_float(rounder)), __uint_as_float(exponent << 23));
  keep(encoding, first + lane, is_finite ? __fsub_rn(value, __uint_as_float(__float_as_uint(decoded) | sign)) : 0.0f);
}

__global__ void decode_fp4(Decoding decoding) {
  const int64_t block_index = int64_t(blockIdx.x) * kFp4Warps + threadIdx.x / 32;
  if (block_index * 32 >= decoding.numel) return;
  const int lane = threadIdx.x % 32;
  const uint8_t* const block = decoding.payload + block_index * 17;
  const uint32_t exponent = block[0];
  const uint32_t scale = exponent == 255 ? kQuietNan : exponent == 0 ? 0x400000u : exponent << 23;
  const uint32_t code = block[1 + lane % 16] >> (lane < 16 ? 0 : 4);
  const uint32_t index = code & 7;
  // Twice the magnitude of E2M1: 0 1 2 3 4 6 8 12.
  const uint32_t halves = index + (index > 4 ? index - 4 : 0) + (index > 6 ? 2 : 0);
  const float magnitude = __fmul_rn(__fmul_rn(float(halves), 0.5f), __uint_as_float(scale));
  write(decoding, block_index * 32 + lane, __uint_as_float(__float_as_uint(magnitude) | (code & 8) << 28));
}

// ---- onebit: 512 threads

__global__ void encode_onebit(Encoding encoding) {
  __shared__ float magnitudes[512];
  __shared__ float shared_scale;
  const int64_t first = int64_t(blockIdx.x) * 512;
  const float value = value_at(encoding, first + threadIdx.x);
  magnitudes[threadIdx.x] = __uint_as_float(magnitude_of(value));
  __syncthreads();
  if (threadIdx.x < 32) {  // sixteen lanes, and then their halves, as on the CPU
    float sum = 0.0f;
    if (threadIdx.x < 16)
      for (int part = 0; part < 512; part += 16) sum = __fadd_rn(sum, magnitudes[part + threadIdx.x]);
    for (int width = 8; width > 0; width /= 2) sum = __fadd_rn(sum, __shfl_down_sync(kWholeWarp, sum, width));
    const int64_t count = min(int64_t(512), encoding.numel - first);
    if (threadIdx.x == 0)
      shared_scale = isfinite(sum) ? __fdiv_rn(sum, float(count)) : __uint_as_float(kQuietNan);
  }
  __syncthreads();
  const float scale = shared_scale;
  uint8_t* const block = encoding.payload + int64_t(blockIdx.x) * 68;
  if (threadIdx.x == 0) write_scale(block, scale);
  const uint32_t sign = __float_as_uint(value) & kSign;
  const uint32_t signs = __ballot_sync(kWholeWarp, sign != 0);
  if (threadIdx.x % 8 == 0) block[4 + threadIdx.x / 8] = uint8_t(signs >> (threadIdx.x % 32));
  const float decoded = __uint_as_float(__float_as_uint(scale) | sign);
  keep(encoding, first + threadIdx.x, isfinite(scale) ? __fsub_rn(value, decoded) : 0.0f);
}

__global__ void decode_onebit(Decoding decoding) {
  const uint8_t* const block = decoding.payload + int64_t(blockIdx.x) * 68;
  const uint32_t is_negative = block[4 + threadIdx.x / 8] >> (threadIdx.x % 8) & 1;
  const float value = __uint_as_float(__float_as_uint(read_scale(block)) ^ is_negative << 31);
  write(decoding, int64_t(blockIdx.x) * 512 + threadIdx.x, value);
}

// ---- launches

// A block of threads for a block of values; fp4: a warp.
template <class Operand>
void launch_form(const Operand& operand, void (*int8)(Operand), void (*fp4)(Operand), void (*onebit)(Operand),
                 cudaStream_t stream) {
  const bool is_fp4 = operand.form.format == BlockFormat::fp4;
  const int64_t numel = is_fp4 ? operand.form.numel * kFp4Warps : operand.form.numel;
  launch(is_fp4 ? fp4 : operand.form.format == BlockFormat::int8 ? int8 : onebit, (operand.numel + numel - 1) / numel,
         static_cast<int>(numel), stream, operand);
}

}  // namespace

void encode_blocks(const Encoding& encoding, cudaStream_t stream) {
  launch_form(encoding, encode_int8, encode_fp4, encode_onebit, stream);
}

void decode_blocks(const Decoding& decoding, cudaStream_t stream) {
  launch_form(decoding, decode_int8, decode_fp4, decode_onebit, stream);
}

}  // namespace psengine
