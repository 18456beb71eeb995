// The kernels of codecs, once; included behind kernels.inl, whose rules hold here too. kernels.h has the form of payloads.

#pragma GCC diagnostic ignored "-Wpsabi"

typedef float Floats __attribute__((vector_size(PSENGINE_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(PSENGINE_VECTOR_BYTES)));
constexpr size_t kLanes = PSENGINE_VECTOR_BYTES / sizeof(float);

inline Floats load_floats(const float* from) {
  Floats values;
  __builtin_memcpy(&values, from, sizeof(values));
  return values;
}

inline void store_floats(float* to, const Floats& values) { __builtin_memcpy(to, &values, sizeof(values)); }

inline Floats spread(float value) { return Floats{} + value; }

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kOne = 0x3f800000;
// 3 * 2^126: what is larger counts as infinite, because a code may stand for more than the value.
constexpr int32_t kLargest = 0x7f400000;
constexpr uint32_t kQuietNan = 0x7fc00000;
// Below it the reciprocal of a scale is infinite, and such values are zero.
constexpr float kSmallestLargest = 127 * 1.17549435e-38f;
// Added to a float of at most 2^22 and subtracted again, it rounds to the nearest integer, ties to even. The sum's lowest
// bits are that integer.
constexpr float kRounder = 12582912.0f;

inline int32_t largest_lane(const Ints& lanes) {
  typedef int32_t Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  __builtin_memcpy(parts, &lanes, sizeof(parts));
  Four largest = parts[0];
  for (const Four& part : parts) largest = part > largest ? part : largest;
#if defined(__SSE2__)
  Four others = reinterpret_cast<Four>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(largest), 0x4e));
  largest = others > largest ? others : largest;
  others = reinterpret_cast<Four>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(largest), 0xb1));
  return (others > largest ? others : largest)[0];
#else
  int32_t result = largest[0];
  for (size_t i = 1; i < 4; ++i) result = largest[i] > result ? largest[i] : result;
  return result;
#endif
}

// The low bytes of sixteen lanes, which hold 0 to 255.
inline void store_bytes(uint8_t* to, const Ints (&sixteen)[16 / kLanes]) {
#if defined(PSENGINE_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(sixteen[0])));
#elif defined(__SSE2__)
  __m128i parts[4];
  __builtin_memcpy(parts, sixteen, sizeof(parts));
  const __m128i low = _mm_packs_epi32(parts[0], parts[1]), high = _mm_packs_epi32(parts[2], parts[3]);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(low, high));
#else
  for (size_t i = 0; i < 16; ++i) to[i] = uint8_t(sixteen[i / kLanes][i % kLanes]);
#endif
}

inline Ints load_bytes(const uint8_t* from) {
#if defined(__SSE2__) && PSENGINE_VECTOR_BYTES == 16
  int32_t four;
  __builtin_memcpy(&four, from, sizeof(four));
  const __m128i zero = _mm_setzero_si128(), words = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero);
  return reinterpret_cast<Ints>(_mm_unpacklo_epi16(words, zero));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Ints);
#endif
}

// corrected[i] = values[i] + residual[i]; returns the largest magnitude's bits, which are above infinity's for a NaN.
template <size_t numel>
inline int32_t correct(float* corrected, const float* values, const float* residual) {
  Ints largest = {};
  for (size_t i = 0; i < numel; i += kLanes) {
    Floats value = load_floats(values + i);
    if (residual != nullptr) value += load_floats(residual + i);
    store_floats(corrected + i, value);
    const Ints magnitude = reinterpret_cast<Ints>(value) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest_lane(largest);
}

inline void write_scale(uint8_t* block, float scale) { __builtin_memcpy(block, &scale, sizeof(scale)); }

inline float read_scale(const uint8_t* block) {
  float scale;
  __builtin_memcpy(&scale, block, sizeof(scale));
  return scale;
}

// ---- int8: the scale is the largest magnitude / 127

struct Int8Block {
  static constexpr size_t numel = 256;
  static constexpr size_t bytes = 4 + numel;

  static void encode(uint8_t* block, const float* values, const float* residual, float* next) {
    alignas(64) float corrected[numel];
    const int32_t bits = correct<numel>(corrected, values, residual);
    const float largest = bits_float(uint32_t(bits));
    const bool is_finite = bits <= kLargest;
    const bool is_large = is_finite && largest >= kSmallestLargest;
    const float scale = is_finite ? (is_large ? largest / 127.0f : 0.0f) : bits_float(kQuietNan);
    const float inverse = is_large ? 127.0f / largest : 0.0f;
    write_scale(block, scale);
    int8_t* const codes = reinterpret_cast<int8_t*>(block + 4);
    if (!is_finite) {
      for (size_t i = 0; i < numel; ++i) codes[i] = 0;
      if (next != nullptr)
        for (size_t i = 0; i < numel; ++i) next[i] = 0.0f;
      return;
    }
    PSENGINE_LOOP
    for (size_t i = 0; i < numel; ++i) codes[i] = int8_t(float_bits(corrected[i] * inverse + kRounder));
    if (next == nullptr) return;
    PSENGINE_LOOP
    for (size_t i = 0; i < numel; ++i) {
      const float rounded = corrected[i] * inverse + kRounder;
      next[i] = corrected[i] - (rounded - kRounder) * scale;
    }
  }

  template <bool adds>
  static void decode(float* into, const uint8_t* block) {
    const float scale = read_scale(block);
    const int8_t* const codes = reinterpret_cast<const int8_t*>(block + 4);
    PSENGINE_LOOP
    for (size_t i = 0; i < numel; ++i) {
      const float value = float(codes[i]) * scale;
      into[i] = adds ? into[i] + value : value;
    }
  }
};

// ---- fp4: OCP's MXFP4. The scale is a power of two, the smallest with which no value is beyond 6

struct Fp4Block {
  static constexpr size_t numel = 32;
  static constexpr size_t bytes = 1 + numel / 2;

  // The magnitudes of the codes 0 to 7, times a scale.
  struct Magnitudes {
#if defined(PSENGINE_F16C)
    Floats table;

    explicit Magnitudes(float scale) {
      constexpr float kE2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
      for (size_t lane = 0; lane < kLanes; ++lane) table[lane] = kE2m1[lane % 8];
      table *= spread(scale);
    }

    // The three lowest bits of each lane.
    Floats of(const Ints& codes) const {
#if defined(PSENGINE_AVX512)
      return reinterpret_cast<Floats>(
          _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512>(table)));
#else
      return reinterpret_cast<Floats>(
          _mm256_permutevar8x32_ps(reinterpret_cast<__m256>(table), reinterpret_cast<__m256i>(codes)));
#endif
    }
#else
    Floats scale;

    explicit Magnitudes(float value) : scale(spread(value) * spread(0.5f)) {}

    Floats of(const Ints& codes) const {
      // Twice the magnitude: 0 1 2 3 4 6 8 12.
      const Ints code = codes & 7;
      const Ints above_4 = (code - 4) & (code > 4);
      const Ints above_6 = (code - 6) & (code > 6);
      return __builtin_convertvector(code + above_4 + above_6 + above_6, Floats) * scale;
    }
#endif
  };

  static void encode(uint8_t* block, const float* values, const float* residual, float* next) {
    alignas(64) float corrected[numel];
    const int32_t bits = correct<numel>(corrected, values, residual);
    if (bits > kLargest) {
      block[0] = 255;
      for (size_t i = 1; i < bytes; ++i) block[i] = 0;
      if (next != nullptr)
        for (size_t i = 0; i < numel; ++i) next[i] = 0.0f;
      return;
    }
    // 6 is 1.5 * 2^2.
    const int32_t wanted = (bits >> 23) - 2 + ((bits & 0x7fffff) > 0x400000);
    const int32_t exponent = wanted < 1 ? 1 : wanted;
    const Floats scale = spread(bits_float(uint32_t(exponent) << 23));
    const Floats inverse = spread(bits_float(uint32_t(254 - exponent) << 23));
    block[0] = uint8_t(exponent);
    Ints packed[16 / kLanes] = {};
    for (size_t i = 0; i < numel; i += kLanes) {
      const Floats value = load_floats(corrected + i);
      const Ints magnitude = reinterpret_cast<Ints>(value * inverse) & kMagnitude;
      // Of the power of two below the magnitude, and of 1 at least, a float that many times as large has half of that
      // power in its last place: the sum is rounded to what E2M1 has there, and of a tie to the even code.
      const Ints power = (magnitude > kOne ? magnitude : Ints{} + kOne) & kInfinity;
      const Ints rounder = power + (22 << 23);
      const Floats rounded = reinterpret_cast<Floats>(magnitude) + reinterpret_cast<Floats>(rounder);
      // Halves of the power, and two codes for each power of two before it.
      const Ints code = reinterpret_cast<Ints>(rounded) - rounder + ((power - kOne) >> 22);
      const Ints sign = reinterpret_cast<Ints>(value) & int32_t(0x80000000);
      const Ints signed_code = code | ((sign >> 28) & 8);
      packed[i % 16 / kLanes] |= i < 16 ? signed_code : signed_code << 4;
      if (next == nullptr) continue;
      const Floats decoded = (rounded - reinterpret_cast<Floats>(rounder)) * scale;
      store_floats(next + i, value - reinterpret_cast<Floats>(reinterpret_cast<Ints>(decoded) | sign));
    }
    store_bytes(block + 1, packed);
  }

  template <bool adds>
  static void decode(float* into, const uint8_t* block) {
    const uint32_t exponent = block[0];
    const Magnitudes magnitudes(
        bits_float(exponent == 255 ? kQuietNan : exponent == 0 ? 0x400000u : exponent << 23));
    for (size_t i = 0; i < numel / 2; i += kLanes) {
      const Ints both = load_bytes(block + 1 + i);
      for (size_t half = 0; half < 2; ++half) {
        const Ints code = half == 0 ? both : both >> 4;
        const Ints sign = (code & 8) << 28;
        const Floats value = reinterpret_cast<Floats>(reinterpret_cast<Ints>(magnitudes.of(code)) | sign);
        float* const place = into + i + half * numel / 2;
        store_floats(place, adds ? load_floats(place) + value : value);
      }
    }
  }
};

// ---- onebit: the scale is the mean magnitude

struct OneBitBlock {
  static constexpr size_t numel = 512;
  static constexpr size_t bytes = 4 + numel / 8;

  static uint32_t signs_of(const Floats& values) {
#if defined(PSENGINE_AVX512)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(values));
#else
    const Ints bits = reinterpret_cast<Ints>(values);
    uint32_t signs = 0;
#if defined(__SSE2__)
    for (size_t i = 0; i < kLanes / 4; ++i) {
      __m128 part;
      __builtin_memcpy(&part, reinterpret_cast<const char*>(&bits) + 16 * i, 16);
      signs |= uint32_t(_mm_movemask_ps(part)) << (4 * i);
    }
#else
    for (size_t lane = 0; lane < kLanes; ++lane) signs |= (uint32_t(bits[lane]) >> 31) << lane;
#endif
    return signs;
#endif
  }

  // `count`: how many of the block's values there are; the others are zeros.
  static void encode(uint8_t* block, const float* values, const float* residual, float* next, size_t count = numel) {
    alignas(64) float corrected[numel];
    // Sixteen lanes, whatever a register holds.
    Floats parts[16 / kLanes] = {};
    for (size_t i = 0; i < numel; i += 16) {
      for (size_t part = 0; part < 16 / kLanes; ++part) {
        const size_t at = i + part * kLanes;
        Floats value = load_floats(values + at);
        if (residual != nullptr) value += load_floats(residual + at);
        store_floats(corrected + at, value);
        parts[part] += reinterpret_cast<Floats>(reinterpret_cast<Ints>(value) & kMagnitude);
      }
    }
    float sums[16];
    __builtin_memcpy(sums, parts, sizeof(sums));
    for (size_t width = 8; width > 0; width /= 2)
      for (size_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    const bool is_finite = int32_t(float_bits(sums[0])) < kInfinity;
    const float scale = is_finite ? sums[0] / float(count) : bits_float(kQuietNan);
    write_scale(block, scale);
    for (size_t i = 0; i < numel; i += 16) {
      uint32_t signs = 0;
      for (size_t part = 0; part < 16; part += kLanes) signs |= signs_of(load_floats(corrected + i + part)) << part;
      const uint16_t written = uint16_t(signs);
      __builtin_memcpy(block + 4 + i / 8, &written, sizeof(written));
    }
    if (next == nullptr) return;
    for (size_t i = 0; i < numel; i += kLanes) {
      const Floats value = load_floats(corrected + i);
      const Ints sign = reinterpret_cast<Ints>(value) & int32_t(0x80000000);
      const Floats decoded = reinterpret_cast<Floats>(reinterpret_cast<Ints>(spread(scale)) | sign);
      store_floats(next + i, is_finite ? value - decoded : Floats{});
    }
  }

  template <bool adds>
  static void decode(float* into, const uint8_t* block) {
    const Ints scale = reinterpret_cast<Ints>(spread(read_scale(block)));
    Ints lanes;
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = 1 << lane;
    for (size_t i = 0; i < numel; i += 16) {
      uint16_t signs;
      __builtin_memcpy(&signs, block + 4 + i / 8, sizeof(signs));
      for (size_t part = 0; part < 16; part += kLanes) {
        const Ints is_negative = (lanes & int32_t(signs >> part)) != 0;
        const Floats value = reinterpret_cast<Floats>(scale ^ (is_negative & int32_t(0x80000000)));
        float* const place = into + i + part;
        store_floats(place, adds ? load_floats(place) + value : value);
      }
    }
  }
};

// ---- runs of blocks; the last may be cut short, and its payload is whole

inline void copy_floats(float* to, const float* from, size_t numel) {
  __builtin_memcpy(to, from, numel * sizeof(float));
}

// So many values ahead of those that are encoded: a block is read and then written, and between the two the processor
// would ask memory for nothing.
constexpr size_t kAhead = 1024;
// Residuals of so many values leave the cache before the next step, so they are written past it.
constexpr size_t kStreamFrom = 1 << 20;

template <bool writes>
inline void prefetch(const float* from, size_t numel) {
  for (size_t i = 0; i < numel; i += 64 / sizeof(float)) __builtin_prefetch(from + i, writes);
}

template <class Block>
void encode_run(uint8_t* payload, const float* values, const float* residual, float* next, size_t numel) {
  size_t i = 0;
  for (; i + Block::numel <= numel; i += Block::numel, payload += Block::bytes) {
    if (i + kAhead + Block::numel <= numel) {
      prefetch<false>(values + i + kAhead, Block::numel);
      if (residual != nullptr) prefetch<false>(residual + i + kAhead, Block::numel);
      if (next != nullptr && numel < kStreamFrom) prefetch<true>(next + i + kAhead, Block::numel);
    }
    const float* const left = residual == nullptr ? nullptr : residual + i;
    if (next == nullptr || numel < kStreamFrom) {
      Block::encode(payload, values + i, left, next == nullptr ? nullptr : next + i);
    } else {
      alignas(64) float kept[Block::numel];
      Block::encode(payload, values + i, left, kept);
      stream(next + i, kept, Block::numel, 1.0);
    }
  }
  if (i == numel) return;
  const size_t count = numel - i;
  float last[Block::numel] = {}, last_residual[Block::numel] = {}, last_next[Block::numel];
  copy_floats(last, values + i, count);
  if (residual != nullptr) copy_floats(last_residual, residual + i, count);
  if constexpr (is_same<Block, OneBitBlock>) {
    Block::encode(payload, last, residual == nullptr ? nullptr : last_residual, last_next, count);
  } else {
    Block::encode(payload, last, residual == nullptr ? nullptr : last_residual, last_next);
  }
  if (next != nullptr) copy_floats(next + i, last_next, count);
}

template <class Block, bool adds>
void decode_run(float* into, const uint8_t* payload, size_t numel) {
  size_t i = 0;
  for (; i + Block::numel <= numel; i += Block::numel, payload += Block::bytes)
    Block::template decode<adds>(into + i, payload);
  if (i == numel) return;
  float last[Block::numel] = {};
  copy_floats(last, into + i, numel - i);
  Block::template decode<adds>(last, payload);
  copy_floats(into + i, last, numel - i);
}

void encode_blocks(BlockFormat format, uint8_t* payload, const float* values, const float* residual, float* next,
                   size_t numel) {
  switch (format) {
    case BlockFormat::int8:
      return encode_run<Int8Block>(payload, values, residual, next, numel);
    case BlockFormat::fp4:
      return encode_run<Fp4Block>(payload, values, residual, next, numel);
    case BlockFormat::onebit:
      return encode_run<OneBitBlock>(payload, values, residual, next, numel);
  }
}

template <class Block>
void decode_or_add(float* into, const uint8_t* payload, size_t numel, bool adds) {
  return adds ? decode_run<Block, true>(into, payload, numel) : decode_run<Block, false>(into, payload, numel);
}

void decode_blocks(BlockFormat format, float* into, const uint8_t* payload, size_t numel, bool adds) {
  switch (format) {
    case BlockFormat::int8:
      return decode_or_add<Int8Block>(into, payload, numel, adds);
    case BlockFormat::fp4:
      return decode_or_add<Fp4Block>(into, payload, numel, adds);
    case BlockFormat::onebit:
      return decode_or_add<OneBitBlock>(into, payload, numel, adds);
  }
}

// ---- topk

size_t collect_large(const float* values, const float* residual, float* next, size_t numel, uint32_t threshold,
                     uint32_t* places, float* found, size_t capacity) {
  size_t count = 0;
  for (size_t i = 0; i < numel; i += kLanes) {
    const size_t here = smaller(kLanes, numel - i);
    Floats value = {};
    if (here == kLanes) {
      value = load_floats(values + i);
      if (residual != nullptr) value += load_floats(residual + i);
    } else {
      for (size_t lane = 0; lane < here; ++lane)
        value[lane] = residual == nullptr ? values[i + lane] : values[i + lane] + residual[i + lane];
    }
    const Ints magnitude = reinterpret_cast<Ints>(value) & kMagnitude;
    if (next != nullptr) {
      const Floats kept = magnitude < kInfinity ? value : Floats{};
      if (here == kLanes) {
        store_floats(next + i, kept);
      } else {
        for (size_t lane = 0; lane < here; ++lane) next[i + lane] = kept[lane];
      }
    }
    // signs_of: all ones where the magnitude is not below the threshold.
    uint32_t hits = OneBitBlock::signs_of(reinterpret_cast<Floats>(magnitude >= int32_t(threshold)));
    for (; hits != 0; hits &= hits - 1) {
      const size_t lane = size_t(__builtin_ctz(hits));
      if (lane >= here) break;
      if (count == capacity) return capacity + 1;
      places[count] = uint32_t(i + lane);
      found[count++] = value[lane];
    }
  }
  return count;
}
