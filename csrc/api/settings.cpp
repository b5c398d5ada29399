#include "base/settings.h"

#include <cstring>
#include <string>

#include "api/ebbtide_settings.h"
#include "api/guard.h"
#include "base/error.h"
#include "base/tag.h"
#include "base/tag_code.h"
#include "base/text.h"
#include "core/state/core.h"
#include "core/state/core_settings.h"
#include "store/disk_directory.h"

// Settings by name.
using namespace ebbtide;
using api::guarded;
using api::require;

namespace {

const SettingFacts& setting_of(const char* name) {
  require(name != nullptr, "name is null");
  if (const SettingFacts* facts = find_setting(name)) return *facts;
  throw InvalidArgument("there is no setting " + in_quotes(name));
}

// The default folder is checked when a backup is made, because a program may never make one.
std::string problem_of(Setting setting, const std::string& source) {
  std::string problem = variable_problem(setting);
  if (setting != Setting::kDiskDirectory || !problem.empty() || source == "default") return problem;
  try {
    check_disk_directory(disk_directory());
  } catch (const StoreError& error) {
    problem = error.what();
  }
  return problem;
}

std::string check(const SettingFacts& facts, std::string_view text, const char* label) {
  std::string checked = check_setting(facts, text, label == nullptr ? facts.name : label);
  if (facts.id == Setting::kDiskDirectory) check_disk_directory(checked);
  return checked;
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_visit_settings(ebbtide_visit_setting visit, void* user, ebbtide_error* error) {
  return guarded(error, [&] {
    require(visit != nullptr, "visit is null");
    for (const SettingFacts& facts : all_settings()) {
      const std::string source = source_of(facts.id);
      const std::string problem = problem_of(facts.id, source);
      if (!problem.empty()) set_said(facts.id);
      const ebbtide_setting shown = {sizeof(ebbtide_setting),
                                     facts.name,
                                     facts.variable,
                                     name_of(facts.kind),
                                     facts.values,
                                     facts.fallback,
                                     facts.readers,
                                     facts.meaning,
                                     facts.none,
                                     facts.is_configurable ? 1 : 0,
                                     facts.is_run_option ? 1 : 0,
                                     source.c_str(),
                                     problem.c_str()};
      visit(user, &shown);
    }
  });
}

ebbtide_status ebbtide_check_setting(const char* name, const char* text, size_t size, const char* label, char* checked,
                                     size_t capacity, size_t* length, ebbtide_error* error) {
  return guarded(error, [&] {
    const SettingFacts& facts = setting_of(name);
    require(text != nullptr, "text is null");
    const std::string plain = check(facts, {text, size}, label);
    require(checked == nullptr || plain.size() < capacity, "the value is longer than the room for it");
    if (checked != nullptr) std::memcpy(checked, plain.c_str(), plain.size() + 1);
    if (length != nullptr) *length = plain.size();
  });
}

ebbtide_status ebbtide_check_disk_directory(const char* path, const char* files, ebbtide_error* error) {
  return guarded(error, [&] {
    require(path != nullptr && files != nullptr, "path or files is null");
    const SettingFacts& of_files = facts_of(Setting::kDiskFiles);
    const SettingFacts& of_path = facts_of(Setting::kDiskDirectory);
    const bool is_named = check_setting(of_files, files, of_files.name) == "named";
    check_disk_directory(check_setting(of_path, path, of_path.name), is_named ? DiskFiles::kNamed : DiskFiles::kHidden);
  });
}

ebbtide_status ebbtide_configure(const char* name, const char* value, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    const SettingFacts& facts = setting_of(name);
    require(facts.is_configurable, "this setting can't be configured: only its variable sets it");
    const auto plain = value == nullptr ? std::nullopt : std::optional(check_setting(facts, value, facts.name));
    configure_setting(Core::instance(), facts.id, plain);
  });
}

ebbtide_status ebbtide_get_setting(const char* name, char* value, size_t capacity, size_t* length,
                                   ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    const std::string text = show_setting(Core::instance(), setting_of(name).id);
    require(value == nullptr || text.size() < capacity, "the value is longer than the room for it");
    if (value != nullptr) std::memcpy(value, text.c_str(), text.size() + 1);
    if (length != nullptr) *length = text.size();
  });
}

ebbtide_status ebbtide_check_tag(const char* text, size_t size, ebbtide_error* error) {
  return guarded(error, [&] {
    require(text != nullptr, "text is null");
    check_tag_name({text, size});
  });
}

ebbtide_status ebbtide_encode_tag(const char* text, size_t size, char* tag, ebbtide_error* error) {
  return guarded(error, [&] {
    require(text != nullptr && tag != nullptr, "text or tag is null");
    const std::string encoded = encode_tag({text, size});
    std::memcpy(tag, encoded.c_str(), encoded.size() + 1);
  });
}

ebbtide_status ebbtide_decode_tag(const char* tag, char* text, size_t capacity, size_t* length, ebbtide_error* error) {
  return guarded(error, [&] {
    require(tag != nullptr && length != nullptr, "tag or length is null");
    const std::string decoded = decode_tag(tag);
    if (text != nullptr && decoded.size() < capacity) std::memcpy(text, decoded.c_str(), decoded.size() + 1);
    *length = decoded.size();
  });
}

}  // extern "C"
