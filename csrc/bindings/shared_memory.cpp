// psengine._native's functions for the shared-memory collective: integers and addresses in, tuples out.
//
// Plain functions of CPython's limited interface, not torch operators: a call costs a tenth of a microsecond instead of
// several, and a small all-reduce takes two.

#include "bindings/shared_memory.h"

#include <cstdint>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)

#include "shared_memory/group.h"

namespace psengine {
namespace {

constexpr const char* kCapsuleName = "psengine.SharedMemoryGroup";

struct PythonError {};  // an exception is set

// Run `body` with C++ exceptions turned into Python's.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// Run `body` without the interpreter's lock, which is taken back before its result or exception goes on.
//
// Not a destructor's work: while the interpreter finalizes, CPython before 3.14 ends a daemon thread that asks for the
// lock by pthread_exit, which unwinds the stack. That must not happen in a destructor (which may not throw, and not at
// all while another exception is under way) nor meet a catch (...) without a `throw`: both end in std::terminate.
template <typename Body>
auto without_interpreter_lock(Body body) {
  std::exception_ptr error;
  if constexpr (std::is_void_v<decltype(body())>) {
    PyThreadState* state = PyEval_SaveThread();
    try {
      body();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    PyEval_RestoreThread(state);
    if (error) std::rethrow_exception(error);
  } else {
    decltype(body()) result{};
    without_interpreter_lock([&]() -> void { result = body(); });
    return result;
  }
}

// From Python. Throws PythonError or std::runtime_error.
template <typename T>
T from_python(PyObject* value);

template <>
SharedMemoryGroup& from_python(PyObject* value) {
  void* pointer = PyCapsule_GetPointer(value, kCapsuleName);
  if (pointer == nullptr) throw PythonError();
  return *static_cast<SharedMemoryGroup*>(pointer);
}

template <>
uint64_t from_python(PyObject* value) {
  auto integer = PyLong_AsUnsignedLongLong(value);
  if (integer == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred()) throw PythonError();
  return integer;
}

template <>
int from_python(PyObject* value) {
  return static_cast<int>(from_python<uint64_t>(value));
}

template <>
char* from_python(PyObject* value) {
  return reinterpret_cast<char*>(from_python<uint64_t>(value));
}

template <>
const char* from_python(PyObject* value) {
  return from_python<char*>(value);
}

template <>
double from_python(PyObject* value) {
  double real = PyFloat_AsDouble(value);
  if (real == -1.0 && PyErr_Occurred()) throw PythonError();
  return real;
}

template <>
bool from_python(PyObject* value) {
  return from_python<uint64_t>(value) != 0;
}

template <>
ScalarKind from_python(PyObject* value) {
  uint64_t kind = from_python<uint64_t>(value);
  if (kind > static_cast<uint64_t>(ScalarKind::int64)) throw std::runtime_error("unknown kind of element");
  return static_cast<ScalarKind>(kind);
}

template <>
Order from_python(PyObject* value) {
  uint64_t order = from_python<uint64_t>(value);
  if (order > static_cast<uint64_t>(Order::rank)) throw std::runtime_error("unknown order of addition");
  return static_cast<Order>(order);
}

template <typename... Types, typename Body, size_t... index>
PyObject* parse_and_call(PyObject* const* values, Body& body, std::index_sequence<index...>) {
  return body(from_python<Types>(values[index])...);
}

// Call `body` with the arguments, parsed as `Types`.
template <typename... Types, typename Body>
PyObject* with_arguments(PyObject* const* values, Py_ssize_t count, Body body) {
  return guarded([&]() -> PyObject* {
    constexpr Py_ssize_t expected = sizeof...(Types);
    if (count != expected) {
      PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
      return nullptr;
    }
    return parse_and_call<Types...>(values, body, std::index_sequence_for<Types...>{});
  });
}

// A method of the group as a function of Python: (group, arguments) -> None or an integer.
template <auto method, typename Result, typename... Types>
PyObject* call_method(Result (SharedMemoryGroup::*)(Types...), PyObject* const* values, Py_ssize_t count) {
  return with_arguments<SharedMemoryGroup&, Types...>(
      values, count, [](SharedMemoryGroup& group, Types... arguments) -> PyObject* {
        if constexpr (std::is_void_v<Result>) {
          without_interpreter_lock([&] { (group.*method)(arguments...); });
          return Py_BuildValue("");
        } else {
          return PyLong_FromUnsignedLongLong(
              without_interpreter_lock([&] { return (group.*method)(arguments...); }));
        }
      });
}

template <auto method>
PyObject* bound(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return call_method<method>(method, values, count);
}

void delete_group(PyObject* capsule) {
  delete static_cast<SharedMemoryGroup*>(PyCapsule_GetPointer(capsule, kCapsuleName));
}

PyObject* control_bytes(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<uint64_t, uint64_t>(values, count, [](uint64_t world_size, uint64_t slot_bytes) {
    return PyLong_FromUnsignedLongLong(SharedMemoryGroup::control_bytes(world_size, slot_bytes));
  });
}

PyObject* join(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<int, uint64_t, uint64_t, uint64_t, uint64_t, Order>(
      values, count,
      [](int file_descriptor, uint64_t slot_bytes, uint64_t rank, uint64_t world_size, uint64_t token, Order order) {
        auto* group = new SharedMemoryGroup(file_descriptor, slot_bytes, rank, world_size, token, order);
        PyObject* capsule = PyCapsule_New(group, kCapsuleName, &delete_group);
        if (capsule == nullptr) delete group;
        return capsule;
      });
}

PyObject* wait(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<SharedMemoryGroup&, uint64_t, double, bool>(
      values, count, [](SharedMemoryGroup& group, uint64_t operation, double timeout_s, bool is_slice) {
        WaitResult result = without_interpreter_lock([&] {
          return group.wait(operation, timeout_s, is_slice, [] {
            PyGILState_STATE state = PyGILState_Ensure();
            bool has_signal = PyErr_CheckSignals() != 0;
            PyGILState_Release(state);
            return has_signal;
          });
        });
        if (result.status == WaitStatus::interrupted) throw PythonError();
        if (result.status == WaitStatus::done) return Py_BuildValue("");
        return Py_BuildValue("(iKs)", static_cast<int>(result.status), static_cast<unsigned long long>(result.ranks),
                             result.detail.c_str());
      });
}

PyObject* states(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<SharedMemoryGroup&>(values, count, [](SharedMemoryGroup& group) {
    std::vector<RankState> states = without_interpreter_lock([&] { return group.states(); });
    PyObject* list = PyList_New(0);
    if (list == nullptr) throw PythonError();
    for (const RankState& state : states) {
      PyObject* entry =
          Py_BuildValue("(LKKOO)", static_cast<long long>(state.process_id),
                        static_cast<unsigned long long>(state.arrived), static_cast<unsigned long long>(state.finished),
                        state.is_closed ? Py_True : Py_False, state.is_running ? Py_True : Py_False);
      int failed = entry == nullptr ? -1 : PyList_Append(list, entry);
      Py_XDECREF(entry);
      if (failed != 0) {
        Py_DECREF(list);
        throw PythonError();
      }
    }
    return list;
  });
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, FastFunction function, const char* documentation) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, documentation};
}

}  // namespace

PyMethodDef* shared_memory_methods() {
  // csrc/shared_memory/group.h documents the methods. `group` is what join returns, addresses are Tensor.data_ptr(),
  // kinds and orders are numbers of ScalarKind and Order.
  using Group = SharedMemoryGroup;
  static PyMethodDef methods[] = {
      method("shared_memory_control_bytes", control_bytes, "(world_size, slot_bytes) -> bytes"),
      method("shared_memory_join", join, "(file descriptor, slot_bytes, rank, world_size, token, order) -> group"),
      method("shared_memory_watch_peers", bound<&Group::watch_peers>, "(group)"),
      method("shared_memory_adopt_segment", bound<&Group::adopt_segment>,
             "(group, file descriptor, bytes, address) -> index"),
      method("shared_memory_release_segment", bound<&Group::release_segment>, "(group, index)"),
      method("shared_memory_all_reduce", bound<&Group::all_reduce>,
             "(group, address, numel, kind, scale) -> operation"),
      method("shared_memory_sum", bound<&Group::sum>,
             "(group, address, numel, kind, scale) -> 0 if the sum is there, else operation"),
      method("shared_memory_broadcast", bound<&Group::broadcast>, "(group, address, bytes, source_rank) -> operation"),
      method("shared_memory_all_gather", bound<&Group::all_gather>, "(group, input, output, bytes) -> operation"),
      method("shared_memory_reduce_scatter", bound<&Group::reduce_scatter>,
             "(group, input, output, numel, kind, scale) -> operation"),
      method("shared_memory_barrier", bound<&Group::barrier>, "(group) -> operation"),
      method("shared_memory_progress", bound<&Group::progress>, "(group) -> last complete operation"),
      method("shared_memory_spin", bound<&Group::spin>, "(group, operation) -> 1 if it is complete, else 0"),
      method("shared_memory_wait", wait, "(group, operation, timeout_s, is_slice) -> None or (status, ranks, detail)"),
      method("shared_memory_states", states, "(group) -> [(process id, arrived, finished, is closed, is running)]"),
      method("shared_memory_has_ended", bound<&Group::has_ended>, "(group) -> 0 or 1"),
      method("shared_memory_close", bound<&Group::close>, "(group)"),
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

}  // namespace psengine

#else  // futexes and memfd are Linux's

namespace psengine {

PyMethodDef* shared_memory_methods() {
  static PyMethodDef none[] = {{nullptr, nullptr, 0, nullptr}};
  return none;
}

}  // namespace psengine

#endif
