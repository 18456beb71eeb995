// Elementwise kernels over contiguous memory: one table of functions per instruction set, chosen at run time.
//
// kernels.inl, with step.inl, rows.inl and codecs.inl, holds the code once; kernels_<instruction set>.cpp compile it.
// Every table computes the same bits, except for NaN payloads: the order of each sum is fixed, and multiplications are
// never fused with additions. Optimizers' steps differ: they have the bits of torch on that instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace psengine {

// The order is known to psengine/kernels/ops.py and psengine/collectives/shared_memory/collective.py.
enum class ScalarKind : int32_t { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3, int32 = 4, int64 = 5 };

constexpr size_t element_bytes(ScalarKind kind) {
  switch (kind) {
    case ScalarKind::float64:
    case ScalarKind::int64:
      return 8;
    case ScalarKind::float32:
    case ScalarKind::int32:
      return 4;
    default:
      return 2;
  }
}

// How a codec writes a block of values: a scale, and a code for each value. The last block of a payload is whole, however
// few values it has. The order is known to psengine/kernels/codec_ops.py, which has the arithmetic in plain torch.
//
//   int8    256 values: float32 scale, 256 signed bytes                                  value = code * scale
//   fp4     32 values: a byte, the scale's exponent; 16 bytes, value i and value i + 16  value = E2M1 * 2^(byte - 127)
//   onebit  512 values: float32 scale; 64 bytes of signs, the first value's lowest       value = scale or -scale
enum class BlockFormat : int32_t { int8 = 0, fp4 = 1, onebit = 2 };

// One step of torch.optim.SGD over contiguous memory. `to` may be `from`; else memory does not overlap.
struct SgdStep {
  const void* from;  // the values
  void* to;          // where the new ones are written
  const void* gradient;
  void* buffer;  // mutated; null without momentum
  double learning_rate, momentum, dampening, weight_decay;
  bool is_first;  // the buffer holds nothing yet
  bool nesterov, maximize;
};

struct Kernels {
  const char* name;

  // destination[i] = source[i] * scale, rounded once to the destination's kind. Floating kinds only. The product is
  // taken in float64 where either side is float64, else in float32; float64 goes to a 16-bit kind through float32, as
  // in torch's casts. Memory must not overlap, except that source and destination may be the same memory of the same
  // kind. `non_finite_count`, unless null, becomes the count of values written that are not finite.
  void (*convert)(void* destination, ScalarKind destination_kind, const void* source, ScalarKind source_kind,
                  size_t numel, double scale, int64_t* non_finite_count);

  // destination[i] += source[i] * scale, product and sum as in convert, rounded once. Floating kinds only.
  void (*accumulate)(void* destination, ScalarKind destination_kind, const void* source, ScalarKind source_kind,
                     size_t numel, double scale);

  // Every destinations[d][i] = ((sources[0][i]*scale + sources[1][i]*scale) + sources[2][i]*scale) + ...
  // 16-bit kinds: each product is rounded to the kind, as if the addend had been scaled by a copy of its own, and so is
  // the sum after each addition; or, where `carries_float32`, it is carried in float32 and rounded once. Integer kinds:
  // scale must be 1. A destination may be one of the sources' memory.
  void (*sum)(void* const* destinations, size_t destination_count, const void* const* sources, size_t source_count,
              ScalarKind kind, size_t numel, double scale, bool carries_float32);

  // convert from float32 to float32 past the caches, where the processor can: for more memory than they hold. Before
  // another thread reads the destination, call finish_streaming on this one.
  void (*stream)(float* destination, const float* source, size_t numel, double scale);

  // Whether every element is finite; integers are.
  bool (*all_finite)(const void* values, ScalarKind kind, size_t numel);

  // float32 and float64 only.
  void (*step_sgd)(const SgdStep& step, ScalarKind kind, size_t numel);

  // The payload of float32 values, a block after the other; blocks_of says how many bytes. What is encoded is
  // values[i] + residual[i]; next[i] is what its payload leaves out, 0 where the block has a value that is not finite.
  // residual and next may be null, and the same memory.
  void (*encode_blocks)(BlockFormat format, uint8_t* payload, const float* values, const float* residual, float* next,
                        size_t numel);

  // into[i] = or += the value of the payload.
  void (*decode_blocks)(BlockFormat format, float* into, const uint8_t* payload, size_t numel, bool adds);

  // The elements of values + residual whose magnitude, as the bits of a float32, is not below `threshold`: their places
  // ascending, and their values. next[i], unless null, is values[i] + residual[i], or 0 where that is not finite.
  // Returns how many, or capacity + 1 as soon as there are more.
  size_t (*collect_large)(const float* values, const float* residual, float* next, size_t numel, uint32_t threshold,
                          uint32_t* places, float* found, size_t capacity);

  // ---- one row of a table, float32; rows.inl

  // The values of a row that was never pushed, from a key of its own: independent, of variance near scale^2 * 2^32 / 3.
  void (*draw_row)(float* row, size_t numel, uint64_t key, float scale);

  // row[j] += gradient[j] * rate, with the bits of torch's dense.add_(sparse, alpha=rate).
  void (*add_to_row)(float* row, const float* gradient, size_t numel, float rate);

  // sums[j] += gradient[j]^2, and the same to copy[j].
  void (*add_squares)(float* sums, float* copy, const float* gradient, size_t numel);

  // row[j] += gradient[j] / (roots[j] + epsilon) * rate, with the bits of torch.optim.Adagrad.
  void (*add_scaled_to_row)(float* row, const float* gradient, const float* roots, size_t numel, float rate,
                            float epsilon);

  float (*sum_of_squares)(const float* gradient, size_t numel);
};

void finish_streaming();

// One for each instruction set; the last two exist on x86-64 alone.
extern const Kernels baseline_kernels, avx2_kernels, avx512_kernels;

// The table for this processor.
const Kernels& kernels();

// Let kernels() be the table of this name ("baseline", "avx2", "avx512") from now on, for tests; false, and nothing
// changes, where it was not compiled or this processor cannot run it.
bool use_kernels(const char* name);

}  // namespace psengine
