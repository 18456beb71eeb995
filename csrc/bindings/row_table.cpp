// psengine._native's functions for tables, with addresses that psengine/kernels/row_table.py has checked.
#include "bindings/arguments.h"

#include <array>

#include <torch/csrc/stable/ops.h>

#include "tables/row_table.h"

namespace psengine {

constexpr const char* kRowTable = "psengine.RowTable";

template <>
inline RowTable& from_python(PyObject* value) {
  void* const pointer = PyCapsule_GetPointer(value, kRowTable);
  if (pointer == nullptr) throw PythonError();
  return *static_cast<RowTable*>(pointer);
}

template <>
inline RowOptimizer from_python(PyObject* value) {
  const uint64_t optimizer = from_python<uint64_t>(value);
  if (optimizer > uint64_t(RowOptimizer::rowwise_adagrad)) throw std::runtime_error("unknown optimizer of rows");
  return RowOptimizer(optimizer);
}

template <>
inline std::vector<RowRun> from_python(PyObject* value) {
  const auto numbers = list_from_python<uint64_t>(value);
  std::vector<RowRun> runs;
  for (size_t i = 0; i + 2 < numbers.size(); i += 3)
    runs.push_back({reinterpret_cast<const int64_t*>(numbers[i]), numbers[i + 1],
                    reinterpret_cast<const float*>(numbers[i + 2])});
  return runs;
}

namespace {

using torch::stable::Tensor;

void square_roots_of_torch(float* values, size_t numel) {
  const std::vector<int64_t> size{int64_t(numel)}, stride{1};
  const Tensor tensor =
      torch::stable::from_blob(values, size, stride, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                               torch::headeronly::ScalarType::Float);
  std::array<StableIValue, 1> stack{torch::stable::detail::from(tensor)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sqrt_", "", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // the result is ours to drop
}

PyObject* make(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<uint64_t, RowOptimizer, double, uint64_t, uint64_t, double>(
      values, count,
      [](uint64_t dim, RowOptimizer optimizer, double epsilon, uint64_t seed, uint64_t number, double std) {
        auto* const table = new RowTable(dim, optimizer, epsilon, seed, number, std, &square_roots_of_torch);
        PyObject* const capsule = PyCapsule_New(table, kRowTable, [](PyObject* of) {
          delete static_cast<RowTable*>(PyCapsule_GetPointer(of, kRowTable));
        });
        if (capsule == nullptr) delete table;
        return capsule;
      });
}

PyObject* parts(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<const int64_t*, uint64_t, uint64_t, uint64_t, int64_t*>(
      values, count, [](const int64_t* ids, uint64_t numel, uint64_t parts, uint64_t seed, int64_t* out) {
        without_interpreter_lock([&] { find_parts(ids, numel, parts, seed, out); });
        return Py_BuildValue("");
      });
}

PyObject* sum(PyObject*, PyObject* const* values, Py_ssize_t count) {
  return with_arguments<std::vector<RowRun>, uint64_t, int64_t*, float*>(
      values, count, [](const std::vector<RowRun>& runs, uint64_t dim, int64_t* ids, float* rows) {
        return PyLong_FromUnsignedLongLong(without_interpreter_lock([&] { return sum_rows(runs, dim, ids, rows); }));
      });
}

}  // namespace

PyMethodDef* row_table_methods() {
  // csrc/tables/row_table.h documents the methods. `table` is what row_table returns; the rest are addresses and counts.
  static PyMethodDef methods[] = {
      method("row_table", make, "(dim, optimizer, epsilon, seed, number, std) -> table"),
      method("row_table_rows", bound<&RowTable::rows>, "(table) -> count"),
      method("row_table_slots", bound<&RowTable::slots>, "(table) -> slots, with those that are free again"),
      method("row_table_bytes", bound<&RowTable::size_bytes>, "(table) -> bytes"),
      method("row_table_gather", bound<&RowTable::gather>, "(table, ids, count, out)"),
      method("row_table_count_absent", bound<&RowTable::count_absent>, "(table, ids, count) -> count"),
      method("row_table_step", bound<&RowTable::step>, "(table, ids, count, gradients, learning rate, stamp)"),
      method("row_table_store", bound<&RowTable::store>, "(table, ids, count, rows, states, stamps)"),
      method("row_table_evict", bound<&RowTable::evict>, "(table, count, keep, their count, ids) -> count"),
      method("row_table_read", bound<&RowTable::read>,
             "(table, first slot, end, stamp, ids, rows, states, stamps) -> count"),
      method("find_parts", parts, "(ids, count, parts, seed, out)"),
      method("sum_rows", sum, "([ids, count, rows, ids, ...], dim, ids, rows) -> count"),
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

}  // namespace psengine
