// Passes over one row of a table (csrc/tables): included after step.inl, whose multiply_add has torch's bits.

// SplitMix64 (Steele, Lea, Flood 2014), begun at `key`: its number j + 1 gives element j. The sum of the number's four
// 16-bit parts, less their mean, is an integer that float32 represents: every processor has the same bits.
void draw_row(float* row, size_t numel, uint64_t key, float scale) {
  PSENGINE_LOOP
  for (size_t j = 0; j < numel; ++j) {
    uint64_t z = key + (j + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    const uint64_t pairs = (z & 0x0000ffff0000ffffu) + ((z >> 16) & 0x0000ffff0000ffffu);
    row[j] = float(int32_t(uint32_t(pairs) + uint32_t(pairs >> 32)) - 2 * 0xffff) * scale;
  }
}

void add_to_row(float* row, const float* gradient, size_t numel, float rate) {
  PSENGINE_LOOP
  for (size_t j = 0; j < numel; ++j) row[j] = multiply_add(gradient[j], rate, row[j]);
}

void add_squares(float* sums, float* copy, const float* gradient, size_t numel) {
  PSENGINE_LOOP
  for (size_t j = 0; j < numel; ++j) copy[j] = sums[j] = sums[j] + gradient[j] * gradient[j];
}

void add_scaled_to_row(float* row, const float* gradient, const float* roots, size_t numel, float rate, float epsilon) {
  PSENGINE_LOOP
  for (size_t j = 0; j < numel; ++j) row[j] = multiply_add(gradient[j] / (roots[j] + epsilon), rate, row[j]);
}

// Sixteen sums, of every sixteenth element each, so that the order does not depend on the width of a register.
float sum_of_squares(const float* gradient, size_t numel) {
  constexpr size_t kSums = 16;
  float sums[kSums] = {};
  size_t j = 0;
  for (; j + kSums <= numel; j += kSums) {
    PSENGINE_LOOP
    for (size_t k = 0; k < kSums; ++k) sums[k] += gradient[j + k] * gradient[j + k];
  }
  for (size_t k = 0; j + k < numel; ++k) sums[k] += gradient[j + k] * gradient[j + k];
  for (size_t half = kSums / 2; half > 0; half /= 2) {
    for (size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0];
}
