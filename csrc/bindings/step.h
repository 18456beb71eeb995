// SGD's step over memory that the caller has checked.
#pragma once

#ifndef Py_LIMITED_API  // setup.py passes it
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

namespace psengine {

// Null-terminated.
PyMethodDef* step_methods();

}  // namespace psengine
