#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "api/ebbtide_settings.h"
#include "bindings/call.h"

// Settings by name.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

struct SettingRow {
  ebbtide_setting setting;  // whose other texts live for ever
  std::string source, problem;
};

std::vector<py::dict> settings() {
  std::vector<SettingRow> rows;
  const auto add = [](void* user, const ebbtide_setting* found) {
    static_cast<std::vector<SettingRow>*>(user)->push_back({*found, found->source, found->problem});
  };
  call(ebbtide_visit_settings, add, &rows);
  std::vector<py::dict> found;
  for (SettingRow& row : rows) {
    const ebbtide_setting& setting = row.setting;
    if (row.source == "configured") row.source = std::string("saver.configure(") + setting.name + "=)";
    using py::literals::operator""_a;
    found.push_back(py::dict("name"_a = setting.name, "variable"_a = setting.variable, "kind"_a = setting.kind,
                             "values"_a = setting.values, "fallback"_a = setting.fallback,
                             "readers"_a = setting.readers, "meaning"_a = setting.meaning, "none"_a = setting.none,
                             "source"_a = row.source, "problem"_a = row.problem,
                             "is_configurable"_a = setting.configurable, "is_run_option"_a = setting.run_option));
  }
  return found;
}

// text: bytes, since a path need not be UTF-8, and a str need not be either.
py::bytes check_setting(const std::string& name, const std::string& text, const std::optional<std::string>& label) {
  std::string checked(text.size() + 128, '\0');  // a size grows by its zeros
  size_t length = 0;
  call(ebbtide_check_setting, name.c_str(), text.data(), text.size(), label ? label->c_str() : nullptr, checked.data(),
       checked.size(), &length);
  return py::bytes(checked.data(), length);
}

void configure(const std::string& name, const std::optional<std::string>& value) {
  call(ebbtide_configure, name.c_str(), value ? value->c_str() : nullptr);
}

py::bytes get_setting(const std::string& name) {
  std::string value(4096, '\0');
  size_t length = 0;
  call(ebbtide_get_setting, name.c_str(), value.data(), value.size(), &length);
  return py::bytes(value.data(), length);
}

void check_disk_directory(const std::string& path, const std::string& files) {
  call(ebbtide_check_disk_directory, path.c_str(), files.c_str());
}

void check_tag(const std::string& text) { call(ebbtide_check_tag, text.data(), text.size()); }

std::string encode_tag(const std::string& text) {
  std::string tag(EBBTIDE_TAG_MAX + 1, '\0');
  call(ebbtide_encode_tag, text.data(), text.size(), tag.data());
  return tag.c_str();
}

// bytes, since the string need not be UTF-8.
py::bytes decode_tag(const std::string& tag) {
  std::string text;
  size_t length = 0;
  const auto decode = [&] { call(ebbtide_decode_tag, tag.c_str(), text.data(), text.size() + 1, &length); };
  decode();
  text.resize(length);
  decode();
  return py::bytes(text);
}

// Its tagging, tag and backup.
template <auto Get>
std::tuple<int, std::string, int> policy_of() {
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  call(Get, &policy);
  return {policy.tagging, policy.tag, policy.backup};
}

}  // namespace

void register_settings(py::module_& module) {
  module.def("settings", &settings);
  module.def("check_setting", &check_setting, py::arg("name"), py::arg("text"), py::arg("label") = py::none());
  module.def("configure", &configure, py::arg("name"), py::arg("value"));
  module.def("get_setting", &get_setting, py::arg("name"));
  module.def("check_disk_directory", &check_disk_directory, py::arg("path"), py::arg("files"));
  module.def("check_tag", &check_tag, py::arg("text"));
  module.def("encode_tag", &encode_tag, py::arg("text"));
  module.def("decode_tag", &decode_tag, py::arg("tag"));
  module.def("program_policy", &policy_of<ebbtide_get_program_policy>);
  module.def("thread_policy", &policy_of<ebbtide_get_thread_policy>);
}

}  // namespace ebbtide::bindings
