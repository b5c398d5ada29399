#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings/call.h"
#include "bindings/records.h"

// Allocations, slots, leases, captures.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

ebbtide_policy policy_of(int backup, bool retain, int overflow, bool flushes_first) {
  ebbtide_policy policy = EBBTIDE_POLICY_INIT;
  policy.backup = backup;
  policy.retain = retain;
  policy.overflow = overflow;
  policy.flushes_first = flushes_first;
  return policy;
}

uint64_t alloc(const std::string& tag, uint64_t size_bytes, int device, const ebbtide_policy& policy) {
  void* address = nullptr;
  call([&](ebbtide_error* error) { return ebbtide_alloc(tag.c_str(), &policy, device, size_bytes, &address, error); });
  return reinterpret_cast<uint64_t>(address);
}

void free_address(uint64_t address) {
  call([&](ebbtide_error* error) { return ebbtide_free(reinterpret_cast<void*>(address), error); });
}

std::optional<ebbtide_allocation_info> find(uint64_t address) {
  bool is_found = false;
  ebbtide_allocation_info info;
  call([&](ebbtide_error* error) { return ebbtide_find(as_pointer(address), &is_found, &info, error); });
  return is_found ? std::optional(info) : std::nullopt;
}

int bind_slot(const std::string& tag, int device, const ebbtide_policy& policy) {
  int32_t slot = -1;
  call([&](ebbtide_error* error) { return ebbtide_bind_slot(tag.c_str(), &policy, device, &slot, error); });
  return slot;
}

uint64_t slot_alloc(int slot, uint64_t size_bytes) {
  return reinterpret_cast<uint64_t>(without_gil([&] { return ebbtide_slot_alloc(slot, size_bytes, nullptr); }));
}

std::pair<uint64_t, uint64_t> torch_functions(int slot) {
  void* malloc_function = nullptr;
  void* free_function = nullptr;
  call([&](ebbtide_error* error) { return ebbtide_torch_functions(slot, &malloc_function, &free_function, error); });
  return {reinterpret_cast<uint64_t>(malloc_function), reinterpret_cast<uint64_t>(free_function)};
}

ebbtide_lease open_lease(const std::string& tag, const std::string& holder) {
  ebbtide_lease lease;
  call([&](ebbtide_error* error) { return ebbtide_open_lease(tag.c_str(), holder.c_str(), &lease, error); });
  return lease;
}

// Strings with a NUL inside would be cut at the C boundary: refuse them here.
void check_text(const std::string& text) {
  if (text.find('\0') != std::string::npos) throw py::value_error("a tag can't hold control characters");
}

}  // namespace

void register_memory(py::module_& module) {
  module.def(
      "alloc",
      [](const std::string& tag, uint64_t size_bytes, int device, int backup, bool retain, int overflow,
         bool flushes_first) {
        check_text(tag);
        return alloc(tag, size_bytes, device, policy_of(backup, retain, overflow, flushes_first));
      },
      py::arg("tag"), py::arg("size_bytes"), py::arg("device") = 0,
      py::arg("backup") = static_cast<int>(EBBTIDE_BACKUP_RAM), py::arg("retain") = false, py::arg("overflow") = 0,
      py::arg("flushes_first") = false);
  module.def("free", &free_address, py::arg("address"));
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
      [](const std::string& tag, int device, int backup, bool retain, int overflow, bool flushes_first) {
        check_text(tag);
        return bind_slot(tag, device, policy_of(backup, retain, overflow, flushes_first));
      },
      py::arg("tag"), py::arg("device"), py::arg("backup"), py::arg("retain") = false, py::arg("overflow") = 0,
      py::arg("flushes_first") = false);
  module.def("slot_alloc", &slot_alloc, py::arg("slot"), py::arg("size_bytes"));
  module.def("torch_functions", &torch_functions, py::arg("slot"));
  module.def("last_lease", [] { return ebbtide_last_lease(); });
  module.def(
      "open_lease",
      [](const std::string& tag, const std::string& holder) {
        check_text(tag);
        return open_lease(tag, holder);
      },
      py::arg("tag"), py::arg("holder"));
  module.def(
      "close_lease", [](uint64_t id) { call([&](ebbtide_error* error) { return ebbtide_close_lease(id, error); }); },
      py::arg("lease_id"));
  module.def("begin_capture", [] { call([](ebbtide_error* error) { return ebbtide_begin_capture(error); }); });
  module.def("end_capture", [] { call([](ebbtide_error* error) { return ebbtide_end_capture(error); }); });
}

}  // namespace ebbtide::bindings
