// psengine._native's functions that call kernels, with addresses of as many elements as their callers say
// (psengine/flat_optimizers), and those for tests.
#include "bindings/arguments.h"

namespace psengine {

template <>
inline std::vector<void*> from_python(PyObject* value) {
  return list_from_python<void*>(value);
}

namespace {

PyObject* kernels_in_use(PyObject*, PyObject* const*, Py_ssize_t) { return PyUnicode_FromString(kernels().name); }

PyObject* use(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<std::string>(
      values, count, [](const std::string& name) { return PyBool_FromLong(use_kernels(name.c_str())); });
}

PyObject* sum(PyObject*, PyObject* const* values, Py_ssize_t count) {
  using Addresses = std::vector<void*>;
  return with_arguments<Addresses, Addresses, ScalarKind, uint64_t, double, bool>(
      values, count,
      [](const Addresses& to, const Addresses& from, ScalarKind kind, uint64_t numel, double scale, bool carries) {
        kernels().sum(to.data(), to.size(), from.data(), from.size(), kind, numel, scale, carries);
        return Py_BuildValue("");
      });
}

PyObject* all_finite(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<ScalarKind, uint64_t, void*>(values, count, [](ScalarKind kind, uint64_t numel, void* of) {
    return PyBool_FromLong(without_interpreter_lock([&] { return kernels().all_finite(of, kind, numel); }));
  });
}

PyObject* step_sgd(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<ScalarKind, uint64_t, void*, void*, void*, void*, double, double, double, double, bool, bool,
                        bool>(
      values, count,
      [](ScalarKind kind, uint64_t numel, void* from, void* to, void* gradient, void* buffer, double learning_rate,
         double momentum, double dampening, double weight_decay, bool is_first, bool nesterov, bool maximize) {
        if (kind != ScalarKind::float32 && kind != ScalarKind::float64)
          throw std::runtime_error("SGD's step is of float32 or float64");
        const SgdStep step{from,     to,        gradient,     buffer,   learning_rate,
                           momentum, dampening, weight_decay, is_first, nesterov, maximize};
        without_interpreter_lock([&] { kernels().step_sgd(step, kind, numel); });
        return Py_BuildValue("");
      });
}

}  // namespace

PyMethodDef* kernel_methods() {
  static PyMethodDef methods[] = {
      method("kernels", kernels_in_use, "() -> the name of the table of CPU kernels in use"),
      method("_use_kernels", use, "(name) -> False where this processor cannot run them; for tests"),
      method("_sum", sum, "(addresses, addresses, kind, numel, scale, carries_float32): Kernels::sum, for tests"),
      method("all_finite", all_finite, "(kind, numel, values) -> bool"),
      method("step_sgd", step_sgd,
             "(kind, numel, from, to, gradient, buffer, learning_rate, momentum, dampening, weight_decay, is_first,"
             " nesterov, maximize)"),
      {nullptr, nullptr, 0, nullptr}};
  return methods;
}

}  // namespace psengine
