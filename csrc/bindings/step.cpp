// psengine/flat_optimizers/native_steps.py calls these, with addresses of as many elements as it says.
#include "bindings/step.h"

#include <cstdint>

#include "kernels/kernels.h"

namespace psengine {
namespace {

void* at(unsigned long long address) { return reinterpret_cast<void*>(uintptr_t(address)); }

// Whether these are a number of elements and of a kind up to `last`; else there is an exception.
bool is_size(int kind, ScalarKind last, Py_ssize_t numel) {
  if (kind >= 0 && kind <= int(last) && numel >= 0) return true;
  PyErr_Format(PyExc_ValueError, "expected a kind from 0 to %d and a numel of at least 0 (got %d and %zd)", int(last),
               kind, numel);
  return false;
}

PyObject* all_finite(PyObject*, PyObject* arguments) {
  int kind = 0;
  Py_ssize_t numel = 0;
  unsigned long long values = 0;
  if (PyArg_ParseTuple(arguments, "inK", &kind, &numel, &values) == 0) return nullptr;
  if (!is_size(kind, ScalarKind::int64, numel)) return nullptr;
  bool found = false;
  Py_BEGIN_ALLOW_THREADS;
  found = kernels().all_finite(at(values), ScalarKind(kind), size_t(numel));
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(found);
}

PyObject* sgd(PyObject*, PyObject* arguments) {
  int kind = 0, is_first = 0, nesterov = 0, maximize = 0;
  Py_ssize_t numel = 0;
  unsigned long long from = 0, to = 0, gradient = 0, buffer = 0;
  SgdStep step{};
  if (PyArg_ParseTuple(arguments, "inKKKKddddppp", &kind, &numel, &from, &to, &gradient, &buffer, &step.learning_rate,
                       &step.momentum, &step.dampening, &step.weight_decay, &is_first, &nesterov, &maximize) == 0)
    return nullptr;
  if (!is_size(kind, ScalarKind::float64, numel)) return nullptr;
  step.from = at(from), step.to = at(to), step.gradient = at(gradient), step.buffer = at(buffer);
  step.is_first = is_first != 0, step.nesterov = nesterov != 0, step.maximize = maximize != 0;
  Py_BEGIN_ALLOW_THREADS;
  kernels().step_sgd(step, ScalarKind(kind), size_t(numel));
  Py_END_ALLOW_THREADS;
  return Py_BuildValue("");
}

PyMethodDef methods[] = {
    {"all_finite", all_finite, METH_VARARGS, "(kind, numel, values) -> bool"},
    {"step_sgd", sgd, METH_VARARGS,
     "(kind, numel, from, to, gradient, buffer, learning_rate, momentum, dampening, weight_decay, is_first, nesterov,"
     " maximize)"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMethodDef* step_methods() { return methods; }

}  // namespace psengine
