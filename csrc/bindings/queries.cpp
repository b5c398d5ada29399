#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/call.h"
#include "bindings/records.h"

// The library, its driver and devices, its allocations and tags.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

ebbtide_device_info query_device(int device) {
  ebbtide_device_info info;
  call([&](ebbtide_error* error) { return ebbtide_query_device(device, &info, error); });
  return info;
}

using CapabilityRow = std::tuple<std::string, bool, std::string, std::string>;  // name, is_available, found, advice
std::vector<CapabilityRow> capabilities(int device) {
  std::vector<CapabilityRow> found;
  const auto add = [](void* user, const char* name, bool is_available, const char* text, const char* advice) {
    static_cast<std::vector<CapabilityRow>*>(user)->emplace_back(name, is_available, text, advice);
  };
  call([&](ebbtide_error* error) { return ebbtide_visit_capabilities(device, add, &found, error); });
  return found;
}

std::vector<ebbtide_tag_info> tags() {
  std::vector<ebbtide_tag_info> found;
  const auto add = [](void* user, const ebbtide_tag_info* info) {
    static_cast<std::vector<ebbtide_tag_info>*>(user)->push_back(*info);
  };
  call([&](ebbtide_error* error) { return ebbtide_visit_tags(add, &found, error); });
  return found;
}

std::optional<ebbtide_tag_info> query_tag(const std::string& tag) {
  bool is_found = false;
  ebbtide_tag_info info;
  call([&](ebbtide_error* error) { return ebbtide_query_tag(tag.c_str(), &is_found, &info, error); });
  return is_found ? std::optional(info) : std::nullopt;
}

void require_tag(const std::string& tag) {
  call([&](ebbtide_error* error) { return ebbtide_query_tag(tag.c_str(), nullptr, nullptr, error); });
}

std::vector<ebbtide_allocation_info> allocations(const std::optional<std::string>& tag) {
  std::vector<ebbtide_allocation_info> found;
  const auto add = [](void* user, const ebbtide_allocation_info* info) {
    static_cast<std::vector<ebbtide_allocation_info>*>(user)->push_back(*info);
  };
  call([&](ebbtide_error* error) {
    return ebbtide_visit_allocations(tag ? tag->c_str() : nullptr, add, &found, error);
  });
  return found;
}

std::vector<StretchRow> stretches(uint64_t address, uint64_t size_bytes) {
  std::vector<StretchRow> found;
  const auto add = [](void* user, const ebbtide_stretch* stretch) {
    static_cast<std::vector<StretchRow>*>(user)->push_back(read_stretch(*stretch));
  };
  call([&](ebbtide_error* error) {
    return ebbtide_visit_stretches(as_pointer(address), size_bytes, add, &found, error);
  });
  return found;
}

// sequence, unix_seconds, seconds, kind, tags, bytes, copied, detail
using EventRow = std::tuple<uint64_t, double, double, std::string, std::string, uint64_t, uint64_t, std::string>;
std::vector<EventRow> events(uint64_t after_sequence) {
  std::vector<EventRow> found;
  const auto add = [](void* user, const ebbtide_event* event) {
    static_cast<std::vector<EventRow>*>(user)->emplace_back(event->sequence, event->unix_seconds, event->seconds,
                                                            event->kind, event->tags, event->bytes, event->copied,
                                                            event->detail);
  };
  call([&](ebbtide_error* error) { return ebbtide_visit_events(after_sequence, add, &found, error); });
  return found;
}

py::dict stats() {
  ebbtide_stats numbers;
  call([&](ebbtide_error* error) { return ebbtide_get_stats(&numbers, error); });
  py::dict found;
#define EBBTIDE_STATS_FIELD(name, meaning) found[#name] = numbers.name;
  EBBTIDE_STATS(EBBTIDE_STATS_FIELD)
#undef EBBTIDE_STATS_FIELD
  return found;
}

void register_lms_settings(py::module_& module) {
  module.def(
      "set_lms_limit",
      [](uint64_t size_bytes) { call([&](ebbtide_error* error) { return ebbtide_set_lms_limit(size_bytes, error); }); },
      py::arg("size_bytes"));
  module.def(
      "set_lms_host_limit",
      [](uint64_t size_bytes) {
        call([&](ebbtide_error* error) { return ebbtide_set_lms_host_limit(size_bytes, error); });
      },
      py::arg("size_bytes"));
  module.def(
      "leave_torch_to_lms",
      [](bool is_left) { call([&](ebbtide_error* error) { return ebbtide_leave_torch_to_lms(is_left, error); }); },
      py::arg("is_left"));
}

}  // namespace

void register_queries(py::module_& module) {
  module.def("loaded_library", [] { return std::string(ebbtide_library_path()); });
  module.def(
      "use_driver",
      [](const std::optional<std::string>& name) {
        call([&](ebbtide_error* error) { return ebbtide_use_driver(name ? name->c_str() : nullptr, error); });
      },
      py::arg("name"));
  module.def("driver_name", [] { return std::string(ebbtide_driver_name()); });
  module.def("driver_version", [] {
    int32_t version = 0;
    call([&](ebbtide_error* error) { return ebbtide_driver_version(&version, error); });
    return version;
  });
  module.def("device_count", [] {
    int32_t count = 0;
    call([&](ebbtide_error* error) { return ebbtide_device_count(&count, error); });
    return count;
  });
  module.def("query_device", &query_device, py::arg("device"));
  module.def("capabilities", &capabilities, py::arg("device"));
  module.def("reset_peaks", [] { call([](ebbtide_error* error) { return ebbtide_reset_peaks(error); }); });
  register_lms_settings(module);
  module.def(
      "fill_host_pool",
      [](int device) { call([&](ebbtide_error* error) { return ebbtide_fill_host_pool(device, error); }); },
      py::arg("device"));
  module.def("tags", &tags);
  module.def("query_tag", &query_tag, py::arg("tag"));
  module.def("require_tag", &require_tag, py::arg("tag"));
  module.def("allocations", &allocations, py::arg("tag") = py::none());
  module.def("stretches", &stretches, py::arg("address"), py::arg("size_bytes"));
  module.def("events", &events, py::arg("after_sequence") = 0);
  module.def("stats", &stats);
}

}  // namespace ebbtide::bindings
