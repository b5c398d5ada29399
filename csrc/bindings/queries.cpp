#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/call.h"
#include "bindings/records.h"

// The library, its driver and devices, limits, and what is there.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

DeviceRecord query_device(int device) {
  ebbtide_device_info info = EBBTIDE_DEVICE_INFO_INIT;
  call([&](ebbtide_error* error) { return ebbtide_query_device(device, &info, error); });
  return {info.device,      info.name,        info.compute_capability,
          info.total_bytes, info.free_bytes,  info.granularity_bytes,
          info.held_bytes,  info.limit_bytes, info.room_bytes,
          info.peak_bytes};
}

std::vector<CapabilityRecord> capabilities(int device) {
  std::vector<CapabilityRecord> found;
  const auto add = [](void* user, const char* name, int available, const char* text, const char* advice) {
    static_cast<std::vector<CapabilityRecord>*>(user)->push_back({name, available != 0, text, advice});
  };
  call([&](ebbtide_error* error) { return ebbtide_visit_capabilities(device, add, &found, error); });
  return found;
}

ebbtide_limit limit_of(const std::string& name) {
  if (name == "device") return EBBTIDE_DEVICE_LIMIT;
  if (name == "host") return EBBTIDE_HOST_LIMIT;
  if (name == "host_margin") return EBBTIDE_HOST_MARGIN;
  if (name == "pinned") return EBBTIDE_PINNED_LIMIT;
  if (name == "reserve") return EBBTIDE_RESERVE;
  if (name == "host_pool") return EBBTIDE_HOST_POOL;
  if (name == "shared_handle") return EBBTIDE_SHARED_HANDLE;
  if (name == "device_margin") return EBBTIDE_DEVICE_MARGIN;
  throw py::value_error("unknown limit '" + name +
                        "': it is device, device_margin, host, host_margin, pinned, reserve, host_pool or "
                        "shared_handle");
}

ebbtide_option option_of(const std::string& name) {
  if (name == "skip_clean") return EBBTIDE_SKIP_CLEAN;
  if (name == "skip_unused") return EBBTIDE_SKIP_UNUSED;
  if (name == "skip_constant") return EBBTIDE_SKIP_CONSTANT;
  if (name == "compare_bytes") return EBBTIDE_COMPARE_BYTES;
  if (name == "poison") return EBBTIDE_POISON;
  if (name == "copy_ahead") return EBBTIDE_COPY_AHEAD;
  throw py::value_error("unknown option '" + name +
                        "': it is skip_clean, skip_unused, skip_constant, compare_bytes, poison or copy_ahead");
}

void set_option(const std::string& name, bool is_on) {
  const ebbtide_option option = option_of(name);
  call([&](ebbtide_error* error) { return ebbtide_set_option(option, is_on ? 1 : 0, error); });
}

bool get_option(const std::string& name) {
  const ebbtide_option option = option_of(name);
  int32_t value = 0;
  call([&](ebbtide_error* error) { return ebbtide_get_option(option, &value, error); });
  return value != 0;
}

void set_limit(const std::string& name, uint64_t size_bytes) {
  const ebbtide_limit limit = limit_of(name);
  call([&](ebbtide_error* error) { return ebbtide_set_limit(limit, size_bytes, error); });
}

uint64_t get_limit(const std::string& name) {
  const ebbtide_limit limit = limit_of(name);
  uint64_t bytes = 0;
  call([&](ebbtide_error* error) { return ebbtide_get_limit(limit, &bytes, error); });
  return bytes;
}

double get_whole_fraction() {
  double fraction = 0;
  call([&](ebbtide_error* error) { return ebbtide_get_whole_fraction(&fraction, error); });
  return fraction;
}

std::vector<TagRecord> tags() {
  std::vector<TagRecord> found;
  const auto add = [](void* user, const ebbtide_tag_info* info) {
    static_cast<std::vector<TagRecord>*>(user)->push_back(read_tag(*info));
  };
  call([&](ebbtide_error* error) { return ebbtide_visit_tags(add, &found, error); });
  return found;
}

std::optional<TagRecord> query_tag(const std::string& tag) {
  int found = 0;
  ebbtide_tag_info info = EBBTIDE_TAG_INFO_INIT;
  call([&](ebbtide_error* error) { return ebbtide_query_tag(tag.c_str(), &found, &info, error); });
  if (found == 0) return std::nullopt;
  return read_tag(info);
}

void require_tag(const std::string& tag) {
  call([&](ebbtide_error* error) { return ebbtide_query_tag(tag.c_str(), nullptr, nullptr, error); });
}

std::vector<AllocationRecord> allocations(const std::optional<std::string>& tag) {
  std::vector<AllocationRecord> found;
  const auto add = [](void* user, const ebbtide_allocation_info* info) {
    static_cast<std::vector<AllocationRecord>*>(user)->push_back(read_allocation(*info));
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
    return ebbtide_visit_stretches(reinterpret_cast<const void*>(address), size_bytes, add, &found, error);
  });
  return found;
}

std::vector<EventRow> events(uint64_t after_sequence) {
  std::vector<EventRow> found;
  const auto add = [](void* user, const ebbtide_event* event) {
    static_cast<std::vector<EventRow>*>(user)->push_back(read_event(*event));
  };
  call([&](ebbtide_error* error) { return ebbtide_visit_events(after_sequence, add, &found, error); });
  return found;
}

py::dict stats() {
  ebbtide_stats numbers{};
  numbers.struct_size = sizeof numbers;
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
      [](bool is_left) {
        call([&](ebbtide_error* error) { return ebbtide_leave_torch_to_lms(is_left ? 1 : 0, error); });
      },
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
  module.def("set_limit", &set_limit, py::arg("name"), py::arg("size_bytes"));
  module.def("get_limit", &get_limit, py::arg("name"));
  module.def(
      "set_whole_fraction",
      [](double fraction) { call([&](ebbtide_error* error) { return ebbtide_set_whole_fraction(fraction, error); }); },
      py::arg("fraction"));
  module.def("get_whole_fraction", &get_whole_fraction);
  module.def(
      "fill_host_pool",
      [](int device) { call([&](ebbtide_error* error) { return ebbtide_fill_host_pool(device, error); }); },
      py::arg("device"));
  module.def("set_option", &set_option, py::arg("name"), py::arg("is_on"));
  module.def("get_option", &get_option, py::arg("name"));
  module.def(
      "set_disk_directory",
      [](const std::optional<std::string>& path) {
        call([&](ebbtide_error* error) { return ebbtide_set_disk_directory(path ? path->c_str() : nullptr, error); });
      },
      py::arg("path"));
  module.def("tags", &tags);
  module.def("query_tag", &query_tag, py::arg("tag"));
  module.def("require_tag", &require_tag, py::arg("tag"));
  module.def("allocations", &allocations, py::arg("tag") = py::none());
  module.def("stretches", &stretches, py::arg("address"), py::arg("size_bytes"));
  module.def("events", &events, py::arg("after_sequence") = 0);
  module.def("stats", &stats);
}

}  // namespace ebbtide::bindings
