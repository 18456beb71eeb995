// psengine._native's functions for the shared-memory collective: integers and addresses in, tuples out.
//
// Plain functions of CPython's limited interface, not torch operators: a call costs a tenth of a microsecond instead of
// several, and a small all-reduce takes ten.

#include "bindings/shared_memory.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
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

struct Arguments {
  PyObject* const* values;
  Py_ssize_t count;

  void expect(Py_ssize_t expected) const {
    if (count == expected) return;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    throw PythonError();
  }
  SharedMemoryGroup& group() const {
    void* pointer = PyCapsule_GetPointer(values[0], kCapsuleName);
    if (pointer == nullptr) throw PythonError();
    return *static_cast<SharedMemoryGroup*>(pointer);
  }
  uint64_t integer(Py_ssize_t index) const {
    auto value = PyLong_AsUnsignedLongLong(values[index]);
    if (value == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred()) throw PythonError();
    return value;
  }
  char* address(Py_ssize_t index) const { return reinterpret_cast<char*>(integer(index)); }
  double real(Py_ssize_t index) const {
    double value = PyFloat_AsDouble(values[index]);
    if (value == -1.0 && PyErr_Occurred()) throw PythonError();
    return value;
  }
  bool boolean(Py_ssize_t index) const { return values[index] == Py_True; }
  std::string text(Py_ssize_t index) const {
    Py_ssize_t length = 0;
    const char* characters = PyUnicode_AsUTF8AndSize(values[index], &length);
    if (characters == nullptr) throw PythonError();
    return std::string(characters, static_cast<size_t>(length));
  }
  Token token(Py_ssize_t index) const {
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(values[index], &bytes, &length) != 0) throw PythonError();
    if (length != static_cast<Py_ssize_t>(kTokenBytes)) throw std::runtime_error("a token has 16 bytes");
    Token token;
    std::memcpy(token.data(), bytes, kTokenBytes);
    return token;
  }
  ScalarKind kind(Py_ssize_t index) const {
    uint64_t value = integer(index);
    if (value > static_cast<uint64_t>(ScalarKind::int64)) throw std::runtime_error("unknown kind of element");
    return static_cast<ScalarKind>(value);
  }
};

void delete_group(PyObject* capsule) {
  delete static_cast<SharedMemoryGroup*>(PyCapsule_GetPointer(capsule, kCapsuleName));
}

PyObject* create_control(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(3);
    int file_descriptor =
        SharedMemoryGroup::create_control(arguments.integer(0), arguments.integer(1), arguments.token(2));
    return PyLong_FromLong(file_descriptor);
  });
}

PyObject* join(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(4);
    auto* group =
        new SharedMemoryGroup(arguments.text(0), arguments.integer(1), arguments.integer(2), arguments.token(3));
    PyObject* capsule = PyCapsule_New(group, kCapsuleName, &delete_group);
    if (capsule == nullptr) delete group;
    return capsule;
  });
}

PyObject* watch_peers(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(1);
    SharedMemoryGroup& group = arguments.group();
    without_interpreter_lock([&] { group.watch_peers(); });
    return Py_BuildValue("");
  });
}

PyObject* adopt_segment(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(4);
    SharedMemoryGroup& group = arguments.group();
    auto file_descriptor = static_cast<int>(arguments.integer(1));
    size_t bytes = arguments.integer(2);
    char* address = arguments.address(3);
    return PyLong_FromSize_t(
        without_interpreter_lock([&] { return group.adopt_segment(file_descriptor, bytes, address); }));
  });
}

PyObject* release_segment(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(2);
    SharedMemoryGroup& group = arguments.group();
    size_t index = arguments.integer(1);
    without_interpreter_lock([&] { group.release_segment(index); });
    return Py_BuildValue("");
  });
}

template <typename Begin>
PyObject* begin(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected, Begin operation) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(expected);
    auto start = operation(arguments);
    return PyLong_FromUnsignedLongLong(without_interpreter_lock(start));
  });
}

PyObject* all_reduce(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return begin(values, count, 6, [](const Arguments& a) {
    return [group = &a.group(), data = a.address(1), numel = a.integer(2), kind = a.kind(3), scale = a.real(4),
            wants_square_sum = a.boolean(5)] { return group->all_reduce(data, numel, kind, scale, wants_square_sum); };
  });
}

PyObject* broadcast(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return begin(values, count, 4, [](const Arguments& a) {
    return [group = &a.group(), data = a.address(1), bytes = a.integer(2), source_rank = a.integer(3)] {
      return group->broadcast(data, bytes, source_rank);
    };
  });
}

PyObject* all_gather(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return begin(values, count, 4, [](const Arguments& a) {
    return [group = &a.group(), input = a.address(1), output = a.address(2), bytes = a.integer(3)] {
      return group->all_gather(input, output, bytes);
    };
  });
}

PyObject* reduce_scatter(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return begin(values, count, 6, [](const Arguments& a) {
    return [group = &a.group(), input = a.address(1), output = a.address(2), numel = a.integer(3), kind = a.kind(4),
            scale = a.real(5)] { return group->reduce_scatter(input, output, numel, kind, scale); };
  });
}

PyObject* barrier(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return begin(values, count, 1, [](const Arguments& a) { return [group = &a.group()] { return group->barrier(); }; });
}

PyObject* progress(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return begin(values, count, 1, [](const Arguments& a) { return [group = &a.group()] { return group->progress(); }; });
}

PyObject* wait(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(3);
    SharedMemoryGroup& group = arguments.group();
    uint64_t operation = arguments.integer(1);
    double timeout_s = arguments.real(2);
    WaitResult result = without_interpreter_lock([&] {
      return group.wait(operation, timeout_s, [] {
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

PyObject* take_square_sum(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(2);
    SharedMemoryGroup& group = arguments.group();
    uint64_t operation = arguments.integer(1);
    return PyFloat_FromDouble(without_interpreter_lock([&] { return group.take_square_sum(operation); }));
  });
}

PyObject* states(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    Arguments arguments{values, count};
    arguments.expect(1);
    SharedMemoryGroup& group = arguments.group();
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

PyObject* close(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    Arguments arguments{values, count};
    arguments.expect(1);
    SharedMemoryGroup& group = arguments.group();
    without_interpreter_lock([&] { group.close(); });
    return Py_BuildValue("");
  });
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, FastFunction function, const char* documentation) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, documentation};
}

}  // namespace

PyMethodDef* shared_memory_methods() {
  // The types and the meaning of each are those of SharedMemoryGroup's methods (csrc/shared_memory/group.h); `group` is what
  // join returns, addresses are Tensor.data_ptr(), kinds are numbers of ScalarKind.
  static PyMethodDef methods[] = {
      method("shared_memory_create_control", create_control, "(world_size, slot_bytes, token) -> file descriptor"),
      method("shared_memory_join", join, "(path, rank, world_size, token) -> group"),
      method("shared_memory_watch_peers", watch_peers, "(group)"),
      method("shared_memory_adopt_segment", adopt_segment, "(group, file descriptor, bytes, address) -> index"),
      method("shared_memory_release_segment", release_segment, "(group, index)"),
      method("shared_memory_all_reduce", all_reduce,
             "(group, address, numel, kind, scale, wants_square_sum) -> operation"),
      method("shared_memory_broadcast", broadcast, "(group, address, bytes, source_rank) -> operation"),
      method("shared_memory_all_gather", all_gather, "(group, input, output, bytes) -> operation"),
      method("shared_memory_reduce_scatter", reduce_scatter,
             "(group, input, output, numel, kind, scale) -> operation"),
      method("shared_memory_barrier", barrier, "(group) -> operation"),
      method("shared_memory_progress", progress, "(group) -> last complete operation"),
      method("shared_memory_wait", wait, "(group, operation, timeout_s) -> None or (status, ranks, detail)"),
      method("shared_memory_take_square_sum", take_square_sum, "(group, operation) -> float"),
      method("shared_memory_states", states, "(group) -> [(process id, arrived, finished, is closed, is running)]"),
      method("shared_memory_close", close, "(group)"),
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
