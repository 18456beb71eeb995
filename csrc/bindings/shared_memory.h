// The shared-memory collective's functions for Python.
#pragma once

#ifndef Py_LIMITED_API  // setup.py passes it
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

namespace psengine {

// Null-terminated; psengine._native's method table.
PyMethodDef* shared_memory_methods();

}  // namespace psengine
