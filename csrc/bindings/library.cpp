// The operators' schemas and the Python module; csrc/kernels/fusion_cpu.cpp and csrc/kernels/fusion_cuda.cu implement the operators.
#include "bindings/ready_counter.h"
#include "bindings/shared_memory.h"
#include "bindings/step.h"

#include <atomic>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "kernels/kernels.h"

// layout: int64 on the CPU, from psengine.kernels.ops.layout_of(). pack_counting_ returns, for each tensor, the number
// of values written that are not finite (int64), on flat's device.
STABLE_TORCH_LIBRARY(psengine, m) {
  m.def("pack_(Tensor(a!) flat, Tensor[] tensors, float scale, Tensor? layout=None) -> ()");
  m.def("unpack_(Tensor(a!)[] tensors, Tensor flat, float scale, Tensor? layout=None) -> ()");
  m.def("pack_counting_(Tensor(a!) flat, Tensor[] tensors, float scale, Tensor? layout=None) -> Tensor");
  m.def("accumulate_(Tensor(a!) destination, Tensor source, float scale) -> ()");
  m.def("encode_blocks_(Tensor(a!) payload, Tensor values, Tensor? residual, Tensor(b!)? next, int format) -> ()");
  m.def("decode_blocks_(Tensor(a!) into, Tensor payload, int format, bool adds) -> ()");
  m.def("encode_largest_(Tensor(a!) places, Tensor(b!) found, Tensor values, Tensor? residual, Tensor(c!)? next) -> ()");
}

namespace {

PyObject* kernels_in_use(PyObject*, PyObject*) { return PyUnicode_FromString(psengine::kernels().name); }

PyObject* use_kernels(PyObject*, PyObject* argument) {
  PyObject* const bytes = PyUnicode_AsUTF8String(argument);
  if (bytes == nullptr) return nullptr;
  const bool is_known = psengine::use_kernels(PyBytes_AsString(bytes));
  Py_DECREF(bytes);
  return PyBool_FromLong(is_known);
}

// Reads a list of at least one address; an empty result with an exception set where it is not one.
std::vector<void*> addresses_of(PyObject* list) {
  std::vector<void*> addresses;
  if (PyList_Check(list) == 0) {
    PyErr_SetString(PyExc_TypeError, "expected a list of addresses");
    return addresses;
  }
  const Py_ssize_t count = PyList_Size(list);
  for (Py_ssize_t i = 0; i < count; ++i) addresses.push_back(PyLong_AsVoidPtr(PyList_GetItem(list, i)));
  if (count == 0) PyErr_SetString(PyExc_ValueError, "expected at least one address, got an empty list");
  if (PyErr_Occurred() != nullptr) addresses.clear();
  return addresses;
}

PyObject* sum(PyObject*, PyObject* arguments) {
  PyObject* destination_list = nullptr;
  PyObject* source_list = nullptr;
  int kind = 0;
  Py_ssize_t numel = 0;
  double scale = 1.0;
  int carries_float32 = 0;
  if (PyArg_ParseTuple(arguments, "OOindp", &destination_list, &source_list, &kind, &numel, &scale, &carries_float32) ==
      0)
    return nullptr;
  const std::vector<void*> destinations = addresses_of(destination_list);
  if (destinations.empty()) return nullptr;
  const std::vector<void*> sources = addresses_of(source_list);
  if (sources.empty()) return nullptr;
  if (kind < 0 || kind > int(psengine::ScalarKind::int64)) {
    PyErr_Format(PyExc_ValueError, "kind must be a number of ScalarKind (expected 0 to 5, got %d)", kind);
    return nullptr;
  }
  if (numel < 0) {
    PyErr_Format(PyExc_ValueError, "numel must not be negative (got %zd)", numel);
    return nullptr;
  }
  psengine::kernels().sum(destinations.data(), destinations.size(), sources.data(), sources.size(),
                          psengine::ScalarKind(kind), size_t(numel), scale, carries_float32 != 0);
  return Py_BuildValue("");
}

// libzmq calls it, on a thread of its own and without the GIL, when the bytes of a message have left; `flag` is of
// psengine/parameter_server/zero_copy.py.
void note_sent(void*, void* flag) { static_cast<std::atomic<int64_t>*>(flag)->store(1, std::memory_order_release); }

PyMethodDef kernel_methods[] = {
    {"kernels", kernels_in_use, METH_NOARGS, "The name of the table of CPU kernels in use."},
    {"_use_kernels", use_kernels, METH_O, "Use a table by name, for tests; False where this processor cannot run it."},
    {"_sum", sum, METH_VARARGS, "Kernels::sum, for tests: lists of addresses, kind, numel, scale, carries_float32."},
    {nullptr, nullptr, 0, nullptr}};

// Raised with every change of the functions or operators for Python; psengine/kernels/native.py expects the same number.
constexpr long kInterface = 8;

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "psengine._native", nullptr, -1, nullptr,
                                 nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  module_definition.m_methods = psengine::shared_memory_methods();
  PyObject* const module = PyModule_Create(&module_definition);
  if (module != nullptr && (PyModule_AddFunctions(module, kernel_methods) != 0 ||
                            PyModule_AddFunctions(module, psengine::ready_counter_methods()) != 0 ||
                            PyModule_AddFunctions(module, psengine::step_methods()) != 0 ||
                            PyModule_AddObject(module, "note_sent",
                                               PyLong_FromVoidPtr(reinterpret_cast<void*>(&note_sent))) != 0 ||
                            PyModule_AddIntConstant(module, "interface", kInterface) != 0)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
