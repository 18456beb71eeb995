// A step of SGD, and whether a gradient may be applied: included after kernels.inl, whose rules hold here too.
//
// Unlike the sums of kernels.inl, a step has the bits of torch's kernels for the same instruction set: those multiply and
// add in one operation where the processor can, and so does this. psengine/flat_optimizers/native_steps.py compares the
// two before it relies on this one.
//
// PSENGINE_FMA: whether the processor multiplies and adds in one operation.

// torch's a + b * c. (Adam is not here: its square root is MKL's, which differs from the processor's in some elements.)
template <class T>
inline T multiply_add(T b, T c, T a) {
#if defined(PSENGINE_FMA)
  if constexpr (is_double<T>) {
    return __builtin_fma(b, c, a);
  } else {
    return __builtin_fmaf(b, c, a);
  }
#else
  return a + b * c;
#endif
}

// ---- finite

template <class T>
bool all_finite_run(const T* values, size_t numel) {
  for (size_t begin = 0; begin < numel; begin += kStage) {
    const size_t end = begin + smaller(kStage, numel - begin);
    uint32_t found = 0;
    for (size_t i = begin; i < end; ++i) found |= uint32_t(is_non_finite(values[i]));
    if (found != 0) return false;
  }
  return true;
}

bool all_finite(const void* values, ScalarKind kind, size_t numel) {
  if (kind == ScalarKind::int32 || kind == ScalarKind::int64) return true;
  bool result = false;
  with_floating(kind, [&](auto of) {
    result = all_finite_run(static_cast<const typename decltype(of)::type*>(values), numel);
  });
  return result;
}

// ---- SGD

enum class Momentum { none, first, plain };

template <class T, Momentum momentum, bool nesterov, bool decays, bool maximize>
void sgd_run(const SgdStep& step, size_t numel) {
  const T* const from = static_cast<const T*>(step.from);
  T* const to = static_cast<T*>(step.to);
  const T* const gradient = static_cast<const T*>(step.gradient);
  T* const buffer = static_cast<T*>(step.buffer);
  const T rate = T(-step.learning_rate), factor = T(step.momentum), share = T(1.0 - step.dampening);
  const T decay = T(step.weight_decay);
  PSENGINE_LOOP
  for (size_t i = 0; i < numel; ++i) {
    const T value = from[i];
    T direction = maximize ? -gradient[i] : gradient[i];
    if constexpr (decays) direction = multiply_add(value, decay, direction);
    if constexpr (momentum != Momentum::none) {
      T kept = direction;
      if constexpr (momentum == Momentum::plain) kept = multiply_add(direction, share, buffer[i] * factor);
      buffer[i] = kept;
      direction = nesterov ? multiply_add(kept, factor, direction) : kept;
    }
    to[i] = multiply_add(direction, rate, value);
  }
}

template <class T, Momentum momentum, bool nesterov>
void sgd_decaying(const SgdStep& step, size_t numel) {
  if (step.maximize) {
    step.weight_decay != 0 ? sgd_run<T, momentum, nesterov, true, true>(step, numel)
                           : sgd_run<T, momentum, nesterov, false, true>(step, numel);
  } else {
    step.weight_decay != 0 ? sgd_run<T, momentum, nesterov, true, false>(step, numel)
                           : sgd_run<T, momentum, nesterov, false, false>(step, numel);
  }
}

template <class T>
void sgd_kind(const SgdStep& step, size_t numel) {
  if (step.buffer == nullptr) return sgd_decaying<T, Momentum::none, false>(step, numel);
  if (step.is_first) {
    step.nesterov ? sgd_decaying<T, Momentum::first, true>(step, numel)
                  : sgd_decaying<T, Momentum::first, false>(step, numel);
  } else {
    step.nesterov ? sgd_decaying<T, Momentum::plain, true>(step, numel)
                  : sgd_decaying<T, Momentum::plain, false>(step, numel);
  }
}

void step_sgd(const SgdStep& step, ScalarKind kind, size_t numel) {
  kind == ScalarKind::float64 ? sgd_kind<double>(step, numel) : sgd_kind<float>(step, numel);
}
