// The function that autograd calls once for each gradient.
#pragma once

#ifndef Py_LIMITED_API  // setup.py passes it
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

namespace psengine {

// Null-terminated.
PyMethodDef* ready_counter_methods();

}  // namespace psengine
