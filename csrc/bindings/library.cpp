// The operators' schemas and the Python module; csrc/kernels/*_cpu.cpp and operators_cuda.cu implement the operators.
#include "bindings/methods.h"

#include <atomic>
#include <cstdint>

#include <torch/csrc/stable/library.h>

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

// libzmq calls it, on a thread of its own and without the GIL, when the bytes of a message have left; `flag` is of
// psengine/parameter_server/zero_copy.py.
void note_sent(void*, void* flag) { static_cast<std::atomic<int64_t>*>(flag)->store(1, std::memory_order_release); }

// Raised with every change of the functions or operators for Python; psengine/kernels/native.py expects the same number.
constexpr long kInterface = 9;

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "psengine._native", nullptr, -1, nullptr,
                                 nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  module_definition.m_methods = psengine::shared_memory_methods();
  PyObject* const module = PyModule_Create(&module_definition);
  if (module != nullptr && (PyModule_AddFunctions(module, psengine::kernel_methods()) != 0 ||
                            PyModule_AddFunctions(module, psengine::ready_counter_methods()) != 0 ||
                            PyModule_AddFunctions(module, psengine::row_table_methods()) != 0 ||
                            PyModule_AddObject(module, "note_sent",
                                               PyLong_FromVoidPtr(reinterpret_cast<void*>(&note_sent))) != 0 ||
                            PyModule_AddIntConstant(module, "interface", kInterface) != 0)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
