// From Python's arguments to those of C++ functions, for functions of METH_FASTCALL.
//
// Plain functions of CPython's limited interface, not torch operators: a call costs a tenth of a microsecond instead of
// several.
#pragma once

#include "bindings/methods.h"

#include <cstdint>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/kernels.h"

namespace psengine {

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
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
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
inline uint64_t from_python(PyObject* value) {
  auto integer = PyLong_AsUnsignedLongLong(value);
  if (integer == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred()) throw PythonError();
  return integer;
}

template <>
inline int from_python(PyObject* value) {
  return static_cast<int>(from_python<uint64_t>(value));
}

template <>
inline std::string from_python(PyObject* value) {
  Py_ssize_t length = 0;
  const char* characters = PyUnicode_AsUTF8AndSize(value, &length);
  if (characters == nullptr) throw PythonError();
  return std::string(characters, static_cast<size_t>(length));
}

template <>
inline double from_python(PyObject* value) {
  double real = PyFloat_AsDouble(value);
  if (real == -1.0 && PyErr_Occurred()) throw PythonError();
  return real;
}

template <>
inline bool from_python(PyObject* value) {
  return from_python<uint64_t>(value) != 0;
}

template <>
inline ScalarKind from_python(PyObject* value) {
  uint64_t kind = from_python<uint64_t>(value);
  if (kind > static_cast<uint64_t>(ScalarKind::int64)) throw std::runtime_error("unknown kind of element");
  return static_cast<ScalarKind>(kind);
}

template <typename T>
std::vector<T> list_from_python(PyObject* value) {
  std::vector<T> elements;
  for (Py_ssize_t i = 0, count = PyList_Size(value); i < count; ++i)
    elements.push_back(from_python<T>(PyList_GetItem(value, i)));
  if (PyErr_Occurred() != nullptr) throw PythonError();
  return elements;
}

// An address.
template <typename T>
T from_python(PyObject* value) {
  static_assert(std::is_pointer_v<T>, "each other type has a function of its own");
  return reinterpret_cast<T>(from_python<uint64_t>(value));
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

// A method of an object as a function of Python: (object, arguments) -> None or an integer.
template <auto method, typename Result, typename Object, typename... Types>
PyObject* call_method(Result (Object::*)(Types...), PyObject* const* values, Py_ssize_t count) {
  return with_arguments<Object&, Types...>(values, count, [](Object& object, Types... arguments) -> PyObject* {
    if constexpr (std::is_void_v<Result>) {
      without_interpreter_lock([&] { (object.*method)(arguments...); });
      return Py_BuildValue("");
    } else {
      return PyLong_FromUnsignedLongLong(without_interpreter_lock([&] { return (object.*method)(arguments...); }));
    }
  });
}

template <auto method>
PyObject* bound(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return call_method<method>(method, values, count);
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef method(const char* name, FastFunction function, const char* documentation) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, documentation};
}

}  // namespace psengine
