#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings/call.h"
#include "bindings/records.h"

// Allocations and slots.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

uint64_t as_number(const void* address) { return reinterpret_cast<uint64_t>(address); }

ebbtide_policy policy_of(int backup, bool retain, int overflow, bool flushes_first, bool is_exportable) {
  ebbtide_policy policy = EBBTIDE_POLICY_INIT;
  policy.backup = backup;
  policy.retain = retain;
  policy.overflow = overflow;
  policy.flushes_first = flushes_first;
  policy.exportable = is_exportable;
  return policy;
}

std::optional<ebbtide_allocation_info> find(uint64_t address) {
  bool is_found = false;
  ebbtide_allocation_info info{};
  call(ebbtide_find, as_pointer(address), &is_found, &info);
  return is_found ? std::optional(info) : std::nullopt;
}

std::pair<uint64_t, uint64_t> torch_functions(int slot) {
  void* malloc_function = nullptr;
  void* free_function = nullptr;
  call(ebbtide_torch_functions, slot, &malloc_function, &free_function);
  return {as_number(malloc_function), as_number(free_function)};
}

}  // namespace

void register_memory(py::module_& module) {
  const py::arg_v retain = py::arg("retain") = false;
  const py::arg_v overflow = py::arg("overflow") = 0;
  const py::arg_v flushes_first = py::arg("flushes_first") = false;
  const py::arg_v exportable = py::arg("exportable") = false;
  module.def(
      "alloc",
      [](const std::string& tag, uint64_t size_bytes, int device, int backup, bool is_retained, int spill,
         bool is_flushing, bool is_exportable) {
        const ebbtide_policy policy = policy_of(backup, is_retained, spill, is_flushing, is_exportable);
        return as_number(get<void*>(ebbtide_alloc, check_text(tag), &policy, device, size_bytes));
      },
      py::arg("tag"), py::arg("size_bytes"), py::arg("device") = 0,
      py::arg("backup") = static_cast<int>(EBBTIDE_BACKUP_RAM), retain, overflow, flushes_first, exportable);
  module.def(
      "free", [](uint64_t address) { call(ebbtide_free, reinterpret_cast<void*>(address)); }, py::arg("address"));
  module.def("find", &find, py::arg("address"));
  module.def(
      "is_away", [](uint64_t address, uint64_t size_bytes) { return ebbtide_is_away(as_pointer(address), size_bytes); },
      py::arg("address"), py::arg("size_bytes"));
  module.def(
      "is_missing",
      [](uint64_t address, uint64_t size_bytes) { return ebbtide_is_missing(as_pointer(address), size_bytes); },
      py::arg("address"), py::arg("size_bytes"));
  module.def(
      "bind_slot",
      [](const std::string& tag, int device, int backup, bool is_retained, int spill, bool is_flushing,
         bool is_exportable) {
        const ebbtide_policy policy = policy_of(backup, is_retained, spill, is_flushing, is_exportable);
        return get<int32_t>(ebbtide_bind_slot, check_text(tag), &policy, device);
      },
      py::arg("tag"), py::arg("device"), py::arg("backup"), retain, overflow, flushes_first, exportable);
  module.def("torch_functions", &torch_functions, py::arg("slot"));
  module.def("last_lease", &ebbtide_last_lease);
}

}  // namespace ebbtide::bindings
