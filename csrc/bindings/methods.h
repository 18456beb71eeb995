// The functions of psengine._native, each table null-terminated.
#pragma once

#ifndef Py_LIMITED_API  // setup.py passes it
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

namespace psengine {

PyMethodDef* kernel_methods();
PyMethodDef* ready_counter_methods();
PyMethodDef* row_table_methods();
PyMethodDef* shared_memory_methods();

}  // namespace psengine
