// The shared-memory collective's functions for Python.
#pragma once

#define Py_LIMITED_API 0x030a0000
#include <Python.h>

namespace psengine {

// Null-terminated; psengine._native's method table.
PyMethodDef* shared_memory_methods();

}  // namespace psengine
