// psengine._native's functions for the shared-memory collective: integers and addresses in, tuples out.
#include "bindings/arguments.h"

#if defined(__linux__)

#include "shared_memory/group.h"

namespace psengine {

constexpr const char* kCapsuleName = "psengine.SharedMemoryGroup";

template <>
inline SharedMemoryGroup& from_python(PyObject* value) {
  void* pointer = PyCapsule_GetPointer(value, kCapsuleName);
  if (pointer == nullptr) throw PythonError();
  return *static_cast<SharedMemoryGroup*>(pointer);
}

template <>
inline Order from_python(PyObject* value) {
  uint64_t order = from_python<uint64_t>(value);
  if (order > static_cast<uint64_t>(Order::rank)) throw std::runtime_error("unknown order of addition");
  return static_cast<Order>(order);
}

namespace {

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
      method("shared_memory_sum_contributions", bound<&Group::sum_contributions>,
             "(group, address, numel, kind, address of pairs (rank, row) of 32 bits, their count) -> operation"),
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
