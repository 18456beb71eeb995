// psengine/gradients/ready_counter.py has the same hook in Python, and says what it does.
#include "bindings/methods.h"

#include <cstdint>

namespace psengine {
namespace {

// ready_counter.py, LONG_WAY and NO_WAY
constexpr int32_t kLongWay = -1;
constexpr int32_t kNoWay = -2;

// What a hook is bound to: a tuple, which Python frees, with the arguments of `counting_hook`.
enum Bound : Py_ssize_t { kLeft, kWays, kPending, kLong, kFull, kIndex };

int32_t* numbers_of(PyObject* bound, Bound item) {
  return reinterpret_cast<int32_t*>(PyByteArray_AsString(PyTuple_GetItem(bound, item)));
}

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// The caller holds the GIL, so no other hook counts meanwhile. The arrays keep their sizes: ready_counter.py holds
// memoryviews of them.
PyObject* hook(PyObject* bound, PyObject* const* arguments, Py_ssize_t count) {
  PyObject* const index_object = PyTuple_GetItem(bound, kIndex);
  const Py_ssize_t index = PyLong_AsSsize_t(index_object);
  const int32_t way = numbers_of(bound, kWays)[index];
  if (way == kNoWay) return none();
  int32_t* const left = numbers_of(bound, kLeft) + index;
  // Autograd's second argument is what the node got: one gradient, None where it is undefined.
  const bool is_undefined = count == 2 && PyTuple_Check(arguments[1]) != 0 && PyTuple_Size(arguments[1]) == 1 &&
                            PyTuple_GetItem(arguments[1], 0) == Py_None;
  if (way == kLongWay || *left <= 0 || is_undefined)
    return PyObject_CallFunctionObjArgs(PyTuple_GetItem(bound, kLong), index_object, nullptr);
  if (--*left > 0 || --numbers_of(bound, kPending)[way] != 0) return none();
  return PyObject_CallFunctionObjArgs(PyTuple_GetItem(bound, kFull), nullptr);
}

PyMethodDef hook_definition = {"counting_hook",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&hook)), METH_FASTCALL,
                               "Counts a gradient; see ready_counter.py."};

PyObject* counting_hook(PyObject*, PyObject* arguments) {
  PyObject* numbers[3];
  PyObject *long_way, *bucket_full;
  Py_ssize_t index = 0;
  if (PyArg_ParseTuple(arguments, "OOOOOn", &numbers[0], &numbers[1], &numbers[2], &long_way, &bucket_full, &index) == 0)
    return nullptr;
  for (PyObject* const array : numbers) {
    if (PyByteArray_Check(array) == 0) {
      PyErr_SetString(PyExc_TypeError, "left, ways and pending must be bytearrays of int32");
      return nullptr;
    }
    const Py_ssize_t count = PyByteArray_Size(array) / Py_ssize_t(sizeof(int32_t));
    if (index < 0 || index >= count) {
      PyErr_Format(PyExc_IndexError, "left, ways and pending must have a number for parameter %zd (got %zd numbers)",
                   index, count);
      return nullptr;
    }
  }
  return PyCFunction_NewEx(&hook_definition, arguments, nullptr);
}

PyMethodDef methods[] = {
    {"counting_hook", counting_hook, METH_VARARGS, "(left, ways, pending, long_way, bucket_full, index) -> hook"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMethodDef* ready_counter_methods() { return methods; }

}  // namespace psengine
