// The kernels, once. kernels_<instruction set>.cpp includes this inside `namespace psengine { namespace {`, after every
// header and after the pragma that names the instruction set, and then defines its table: PSENGINE_TABLE at the end.
//
// Two rules keep code for a newer processor from running on an older one: everything here has internal linkage, and
// nothing here uses a template or an inline function of the standard library, whose one copy in the whole program might
// otherwise be the one that was compiled here.
//
// PSENGINE_VECTOR_BYTES: width of a vector register. PSENGINE_F16C, PSENGINE_AVX512: whether intrinsics may be used.
//
// No header guard: one inclusion per translation unit.

// Memory either does not overlap or is the same, element by element.
#if defined(__clang__)
#define PSENGINE_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define PSENGINE_LOOP _Pragma("GCC ivdep")
#endif

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;
template <class T>
constexpr bool is_double = is_same<T, double>;
template <class T>
constexpr bool is_half = is_same<T, Half>;
template <class T>
constexpr bool is_16_bit = is_same<T, Half> || is_same<T, BFloat16>;

template <bool condition, class Then, class Else>
struct SelectType {
  using type = Then;
};
template <class Then, class Else>
struct SelectType<false, Then, Else> {
  using type = Else;
};
template <bool condition, class Then, class Else>
using Select = typename SelectType<condition, Then, Else>::type;
// What products and sums of these kinds are taken in.
template <class A, class B>
using Work = Select<is_double<A> || is_double<B>, double, float>;

// Blocks of this many elements are staged in the first-level cache.
constexpr size_t kStage = 1024;

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

inline uint32_t float_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// ---- one element

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) { return bits_float(uint32_t(value.bits) << 16); }

template <class T, class W>
inline T narrow(W value) {
  return T(value);
}
// Round to nearest even; a NaN, which rounding could turn into infinity, becomes the quiet one.
template <>
inline BFloat16 narrow<BFloat16>(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return BFloat16{uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
}
// Through float32, as torch's casts go.
template <>
inline BFloat16 narrow<BFloat16>(double value) {
  return narrow<BFloat16>(float(value));
}

// ---- half precision: whole blocks, because the processors' conversions are vector instructions

#if defined(PSENGINE_AVX512)

// Masked even where the mask is full: gcc 12 takes the unmasked intrinsics' ignored operand for an uninitialized one
// (GCC bug 105593).
inline __mmask16 first_lanes(size_t count) { return __mmask16(count >= 16 ? 0xffff : (1u << count) - 1); }

void widen_block(float* destination, const Half* source, size_t numel) {
  for (size_t i = 0; i < numel; i += 16) {
    const __mmask16 lanes = first_lanes(numel - i);
    _mm512_mask_storeu_ps(destination + i, lanes,
                          _mm512_maskz_cvtph_ps(lanes, _mm256_maskz_loadu_epi16(lanes, source + i)));
  }
}

void narrow_block(Half* destination, const float* source, size_t numel) {
  for (size_t i = 0; i < numel; i += 16) {
    const __mmask16 lanes = first_lanes(numel - i);
    const __m512 loaded = _mm512_maskz_loadu_ps(lanes, source + i);
    _mm256_mask_storeu_epi16(destination + i, lanes,
                             _mm512_maskz_cvtps_ph(lanes, loaded, _MM_FROUND_TO_NEAREST_INT));
  }
}

#elif defined(PSENGINE_F16C)

void widen_block(float* destination, const Half* source, size_t numel) {
  size_t i = 0;
  for (; i + 8 <= numel; i += 8)
    _mm256_storeu_ps(destination + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
  for (; i < numel; ++i) destination[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(source[i].bits)));
}

void narrow_block(Half* destination, const float* source, size_t numel) {
  size_t i = 0;
  for (; i + 8 <= numel; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < numel; ++i)
    destination[i].bits =
        uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(source[i]), _MM_FROUND_TO_NEAREST_INT)));
}

#elif defined(__aarch64__)

void widen_block(float* destination, const Half* source, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    __fp16 value;
    __builtin_memcpy(&value, &source[i], sizeof(value));
    destination[i] = float(value);
  }
}

void narrow_block(Half* destination, const float* source, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    const __fp16 value = __fp16(source[i]);
    __builtin_memcpy(&destination[i], &value, sizeof(value));
  }
}

#else

// Without branches, so that the compiler can use vectors. The method is Fabian Giesen's (float->half variants): moving
// the exponent's bias does normal numbers; an addition lets the floating-point unit shift and round subnormal ones.
inline float widen_in_software(Half value) {
  const uint32_t shifted = uint32_t(value.bits & 0x7fff) << 13;
  const uint32_t exponent = shifted & 0x0f800000;
  const uint32_t rebiased = shifted + ((127 - 15) << 23);
  const uint32_t special = (rebiased + ((128 - 16) << 23)) | ((shifted & 0x7fffff) != 0 ? 0x400000 : 0);
  const uint32_t subnormal = float_bits(bits_float(rebiased + (1 << 23)) - bits_float(113 << 23));
  const uint32_t magnitude = exponent == 0x0f800000 ? special : exponent == 0 ? subnormal : rebiased;
  return bits_float(magnitude | (uint32_t(value.bits & 0x8000) << 16));
}

inline Half narrow_in_software(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t quiet_nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  const uint32_t special = magnitude > 0x7f800000 ? quiet_nan : 0x7c00;
  constexpr uint32_t kMagic = (127 - 15 + 23 - 10 + 1) << 23;
  const uint32_t subnormal = float_bits(bits_float(magnitude) + bits_float(kMagic)) - kMagic;
  const uint32_t normal = (magnitude + ((magnitude >> 13) & 1) + 0xfff - ((127u - 15) << 23)) >> 13;
  const uint32_t result = magnitude >= ((127 + 16) << 23) ? special : magnitude < (113 << 23) ? subnormal : normal;
  return Half{uint16_t(result | ((bits >> 16) & 0x8000))};
}

void widen_block(float* __restrict destination, const Half* __restrict source, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = widen_in_software(source[i]);
}

void narrow_block(Half* __restrict destination, const float* __restrict source, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = narrow_in_software(source[i]);
}

#endif

// ---- values that are not finite

inline bool is_non_finite(float value) { return (float_bits(value) & 0x7f800000) == 0x7f800000; }
inline bool is_non_finite(Half value) { return (value.bits & 0x7c00) == 0x7c00; }
inline bool is_non_finite(BFloat16 value) { return (value.bits & 0x7f80) == 0x7f80; }
inline bool is_non_finite(double value) {
  uint64_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7ff0000000000000) == 0x7ff0000000000000;
}

template <class T>
int64_t count_non_finite(const T* values, size_t numel) {
  // Most blocks have none; vectors say so faster than they count.
  Select<sizeof(T) == 8, uint64_t, Select<sizeof(T) == 4, uint32_t, uint16_t>> found = 0;
  PSENGINE_LOOP
  for (size_t i = 0; i < numel; ++i) found |= is_non_finite(values[i]);
  if (found == 0) return 0;
  int64_t count = 0;
  for (size_t i = 0; i < numel; ++i) count += is_non_finite(values[i]);
  return count;
}

// ---- convert

template <class D, class S>
void convert_run(D* destination, const S* source, size_t numel, Work<D, S> scale) {
  using W = Work<D, S>;
  if constexpr (is_same<D, S>) {
    if (scale == W(1)) {
      if (static_cast<const void*>(destination) != static_cast<const void*>(source))
        __builtin_memcpy(destination, source, numel * sizeof(D));
      return;
    }
  }
  if constexpr (is_half<D> || is_half<S>) {
    float staged_source[kStage];
    float staged_destination[kStage];
    for (size_t begin = 0; begin < numel; begin += kStage) {
      const size_t count = smaller(kStage, numel - begin);
      D* const to = destination + begin;
      const S* const from = source + begin;
      if constexpr (is_half<S>) {
        widen_block(staged_source, from, count);
        if constexpr (is_half<D>) {
          for (size_t i = 0; i < count; ++i) staged_destination[i] = staged_source[i] * scale;
          narrow_block(to, staged_destination, count);
        } else {
          PSENGINE_LOOP
          for (size_t i = 0; i < count; ++i) to[i] = narrow<D>(W(staged_source[i]) * scale);
        }
      } else {
        PSENGINE_LOOP
        for (size_t i = 0; i < count; ++i) staged_destination[i] = float(W(widen(from[i])) * scale);
        narrow_block(to, staged_destination, count);
      }
    }
  } else {
    PSENGINE_LOOP
    for (size_t i = 0; i < numel; ++i) destination[i] = narrow<D>(W(widen(source[i])) * scale);
  }
}

template <class D, class S>
void convert_pair(void* destination, const void* source, size_t numel, double scale, int64_t* non_finite_count) {
  D* const to = static_cast<D*>(destination);
  const S* const from = static_cast<const S*>(source);
  const auto work_scale = Work<D, S>(scale);
  if (non_finite_count == nullptr) {
    convert_run<D, S>(to, from, numel, work_scale);
    return;
  }
  *non_finite_count = 0;
  // Block by block, while what was written is still in the first-level cache.
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t count = smaller(kStage, numel - begin);
    convert_run<D, S>(to + begin, from + begin, count, work_scale);
    *non_finite_count += count_non_finite(to + begin, count);
  }
}

// ---- stream

void stream(float* destination, const float* source, size_t numel, double double_scale) {
  const float scale = float(double_scale);
#if defined(__SSE2__)
  // Whole cache lines, which need not be read before they are overwritten.
  constexpr size_t kLine = 64 / sizeof(float);
  typedef float Line __attribute__((vector_size(PSENGINE_VECTOR_BYTES)));
  constexpr size_t kVector = PSENGINE_VECTOR_BYTES / sizeof(float);
  const uintptr_t address = reinterpret_cast<uintptr_t>(destination);
  size_t i = numel;  // all, where not even elements are aligned: memory that no allocator gave
  if (address % sizeof(float) == 0) i = smaller(numel, (0 - address / sizeof(float)) % kLine);
  convert_run<float, float>(destination, source, i, scale);
  for (; i + kLine <= numel; i += kLine) {
    for (size_t k = 0; k < kLine; k += kVector) {
      Line values;
      __builtin_memcpy(&values, source + i + k, sizeof(values));
      values *= scale;
#if defined(PSENGINE_AVX512)
      _mm512_stream_ps(destination + i + k, reinterpret_cast<__m512>(values));
#elif defined(PSENGINE_F16C)
      _mm256_stream_ps(destination + i + k, reinterpret_cast<__m256>(values));
#else
      _mm_stream_ps(destination + i + k, reinterpret_cast<__m128>(values));
#endif
    }
  }
  convert_run<float, float>(destination + i, source + i, numel - i, scale);
#else
  convert_run<float, float>(destination, source, numel, scale);
#endif
}

// ---- accumulate

template <class D, class S>
void accumulate_pair(void* destination, const void* source, size_t numel, double double_scale) {
  using W = Work<D, S>;
  D* const to = static_cast<D*>(destination);
  const S* const from = static_cast<const S*>(source);
  const W scale = W(double_scale);
  if constexpr (is_half<D> || is_half<S>) {
    float addend[kStage];
    float sum[kStage];
    for (size_t begin = 0; begin < numel; begin += kStage) {
      const size_t count = smaller(kStage, numel - begin);
      D* const block = to + begin;
      if constexpr (is_half<S>) widen_block(addend, from + begin, count);
      const auto addend_at = [&](size_t i) {
        if constexpr (is_half<S>) {
          return W(addend[i]) * scale;
        } else {
          return W(widen(from[begin + i])) * scale;
        }
      };
      if constexpr (is_half<D>) {
        widen_block(sum, block, count);
        PSENGINE_LOOP
        for (size_t i = 0; i < count; ++i) sum[i] = float(W(sum[i]) + addend_at(i));
        narrow_block(block, sum, count);
      } else {
        PSENGINE_LOOP
        for (size_t i = 0; i < count; ++i) block[i] = narrow<D>(W(widen(block[i])) + addend_at(i));
      }
    }
  } else {
    PSENGINE_LOOP
    for (size_t i = 0; i < numel; ++i) to[i] = narrow<D>(W(widen(to[i])) + W(widen(from[i])) * scale);
  }
}

// ---- sum

// An addend as it enters the sum: a 16-bit kind's product is rounded to the kind first.
template <bool is_scaled, class T>
inline Work<T, T> product(T value, Work<T, T> scale) {
  if constexpr (!is_scaled) {
    return widen(value);
  } else if constexpr (is_16_bit<T>) {
    return widen(narrow<T>(widen(value) * scale));
  } else {
    return widen(value) * scale;
  }
}

// Few enough for their pointers and values to stay in registers.
template <bool is_scaled, bool rounds_each, int destination_count, int count, class T>
void sum_in_registers(T* const* destinations, const T* const* sources, size_t numel, Work<T, T> scale) {
  const T* source[count];
  T* destination[destination_count];
  for (int k = 0; k < count; ++k) source[k] = sources[k];
  for (int k = 0; k < destination_count; ++k) destination[k] = destinations[k];
  PSENGINE_LOOP
  for (size_t i = 0; i < numel; ++i) {
    Work<T, T> sum = product<is_scaled>(source[0][i], scale);
    for (int k = 1; k < count; ++k) {
      sum += product<is_scaled>(source[k][i], scale);
      if (rounds_each && k + 1 < count) sum = widen(narrow<T>(sum));
    }
    for (int k = 0; k < destination_count; ++k) destination[k][i] = narrow<T>(sum);
  }
}

template <bool rounds_each, int count, class T>
void sum_counted(T* const* destinations, const T* const* sources, size_t numel, Work<T, T> scale) {
  if (is_16_bit<T> && scale == 1) {
    sum_in_registers<false, rounds_each, count, count>(destinations, sources, numel, scale);
  } else {
    sum_in_registers<true, rounds_each, count, count>(destinations, sources, numel, scale);
  }
}

// A block of the first destination, and copies of it to the others while it is in the cache.
template <bool rounds_each, int count, class T>
void sum_and_copy(T* const* destinations, size_t destination_count, const T* const* sources, size_t numel) {
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t block = smaller(kStage, numel - begin);
    T* const first = destinations[0] + begin;
    const T* source[count];
    for (int k = 0; k < count; ++k) source[k] = sources[k] + begin;
    sum_in_registers<false, rounds_each, 1, count>(&first, source, block, Work<T, T>(1));
    for (size_t k = 1; k < destination_count; ++k) __builtin_memcpy(destinations[k] + begin, first, block * sizeof(T));
  }
}

// Integers wrap around, as torch's do: a signed overflow would be undefined.
inline float plus(float a, float b) { return a + b; }
inline double plus(double a, double b) { return a + b; }
inline int32_t plus(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
inline int64_t plus(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }

template <class T>
void add_scaled(T* __restrict sum, const T* __restrict source, size_t numel, T scale, bool first) {
  if (first) {
    for (size_t i = 0; i < numel; ++i) sum[i] = source[i] * scale;
  } else {
    for (size_t i = 0; i < numel; ++i) sum[i] = plus(sum[i], source[i] * scale);
  }
}

void add_scaled(float* __restrict sum, const BFloat16* __restrict source, size_t numel, float scale, bool first) {
  if (first) {
    for (size_t i = 0; i < numel; ++i) sum[i] = product<true>(source[i], scale);
  } else {
    for (size_t i = 0; i < numel; ++i) sum[i] += product<true>(source[i], scale);
  }
}

void add_scaled(float* __restrict sum, const Half* __restrict source, size_t numel, float scale, bool first) {
  float addend[kStage];
  Half rounded[kStage];
  float* const widened = first ? sum : addend;
  widen_block(widened, source, numel);
  if (scale != 1.0f) {
    for (size_t i = 0; i < numel; ++i) widened[i] *= scale;
    narrow_block(rounded, widened, numel);
    widen_block(widened, rounded, numel);
  }
  if (first) return;
  for (size_t i = 0; i < numel; ++i) sum[i] += addend[i];
}

inline void narrow_block(BFloat16* destination, const float* source, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = narrow<BFloat16>(source[i]);
}

inline void widen_block(float* destination, const BFloat16* source, size_t numel) {
  for (size_t i = 0; i < numel; ++i) destination[i] = widen(source[i]);
}

// Any counts: a block of the sum is built in the first-level cache, then written to every destination.
template <bool rounds_each, class T>
void sum_staged(T* const* destinations, size_t destination_count, const T* const* sources, size_t source_count,
                size_t numel, double scale) {
  using Stage = Select<is_16_bit<T>, float, T>;
  Stage sum[kStage];
  T rounded[kStage];
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t count = smaller(kStage, numel - begin);
    for (size_t k = 0; k < source_count; ++k) {
      add_scaled(sum, sources[k] + begin, count, Stage(scale), k == 0);
      if constexpr (rounds_each) {
        if (k > 0 && k + 1 < source_count) {
          narrow_block(rounded, sum, count);
          widen_block(sum, rounded, count);
        }
      }
    }
    const void* result = sum;
    if constexpr (is_16_bit<T>) {
      result = rounded;
      narrow_block(rounded, sum, count);
    }
    for (size_t k = 0; k < destination_count; ++k)
      __builtin_memcpy(destinations[k] + begin, result, count * sizeof(T));
  }
}

template <bool rounds_each, class T>
void sum_run(T* const* destinations, size_t destination_count, const T* const* sources, size_t source_count,
             size_t numel, double scale) {
  if constexpr (is_same<T, float> || is_double<T> || is_same<T, BFloat16>) {
    constexpr size_t kMost = 4;
    if (destination_count == source_count && source_count <= kMost) {
      const auto work_scale = Work<T, T>(scale);
      switch (source_count) {
        case 1:
          return sum_counted<rounds_each, 1>(destinations, sources, numel, work_scale);
        case 2:
          return sum_counted<rounds_each, 2>(destinations, sources, numel, work_scale);
        case 3:
          return sum_counted<rounds_each, 3>(destinations, sources, numel, work_scale);
        case 4:
          return sum_counted<rounds_each, 4>(destinations, sources, numel, work_scale);
      }
    }
  }
  if constexpr (is_same<T, float> || is_same<T, BFloat16>) {
    if (scale == 1) {
      switch (source_count) {
        case 2:
          return sum_and_copy<rounds_each, 2>(destinations, destination_count, sources, numel);
        case 3:
          return sum_and_copy<rounds_each, 3>(destinations, destination_count, sources, numel);
        case 4:
          return sum_and_copy<rounds_each, 4>(destinations, destination_count, sources, numel);
        case 6:
          return sum_and_copy<rounds_each, 6>(destinations, destination_count, sources, numel);
        case 8:
          return sum_and_copy<rounds_each, 8>(destinations, destination_count, sources, numel);
      }
    }
  }
  sum_staged<rounds_each>(destinations, destination_count, sources, source_count, numel, scale);
}

template <class T>
void sum_kind(void* const* destinations, size_t destination_count, const void* const* sources, size_t source_count,
              size_t numel, double scale, bool carries_float32) {
  T* const* const to = reinterpret_cast<T* const*>(destinations);
  const T* const* const from = reinterpret_cast<const T* const*>(sources);
  if constexpr (is_16_bit<T>) {
    if (!carries_float32) return sum_run<true>(to, destination_count, from, source_count, numel, scale);
  }
  sum_run<false>(to, destination_count, from, source_count, numel, scale);
}

// ---- by kind: what the table holds

template <class T>
struct Kind {
  using type = T;
};

// visit(Kind<T>()) for the floating kind; the integer kinds are not reached: callers check kinds.
template <class Visit>
inline void with_floating(ScalarKind kind, const Visit& visit) {
  switch (kind) {
    case ScalarKind::float32:
      return visit(Kind<float>());
    case ScalarKind::float64:
      return visit(Kind<double>());
    case ScalarKind::float16:
      return visit(Kind<Half>());
    case ScalarKind::bfloat16:
      return visit(Kind<BFloat16>());
    default:
      __builtin_trap();
  }
}

template <class Visit>
inline void with_any(ScalarKind kind, const Visit& visit) {
  if (kind == ScalarKind::int32) return visit(Kind<int32_t>());
  if (kind == ScalarKind::int64) return visit(Kind<int64_t>());
  with_floating(kind, visit);
}

void convert(void* destination, ScalarKind destination_kind, const void* source, ScalarKind source_kind, size_t numel,
             double scale, int64_t* non_finite_count) {
  with_floating(destination_kind, [&](auto to) {
    with_floating(source_kind, [&](auto from) {
      convert_pair<typename decltype(to)::type, typename decltype(from)::type>(destination, source, numel, scale,
                                                                               non_finite_count);
    });
  });
}

void accumulate(void* destination, ScalarKind destination_kind, const void* source, ScalarKind source_kind,
                size_t numel, double scale) {
  with_floating(destination_kind, [&](auto to) {
    with_floating(source_kind, [&](auto from) {
      accumulate_pair<typename decltype(to)::type, typename decltype(from)::type>(destination, source, numel, scale);
    });
  });
}

void sum(void* const* destinations, size_t destination_count, const void* const* sources, size_t source_count,
         ScalarKind kind, size_t numel, double scale, bool carries_float32) {
  with_any(kind, [&](auto of) {
    sum_kind<typename decltype(of)::type>(destinations, destination_count, sources, source_count, numel, scale,
                                          carries_float32);
  });
}

#include "kernels/step.inl"
#include "kernels/rows.inl"
#include "kernels/codecs.inl"

#define PSENGINE_TABLE(name)                                                                                    \
  {name,       convert,       accumulate,    sum,           stream,   all_finite, step_sgd,    encode_blocks,    \
   decode_blocks, collect_large, draw_row, add_to_row, add_squares, add_scaled_to_row, sum_of_squares}
