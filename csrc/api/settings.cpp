#include "base/settings.h"

#include <cstring>
#include <string>

#include "api/ebbtide_settings.h"
#include "api/guard.h"
#include "api/view.h"
#include "base/tag.h"
#include "base/tag_code.h"
#include "base/text.h"
#include "core/allocate/thread_policy.h"
#include "core/state/core_settings.h"
#include "store/disk_directory.h"

// Settings by name, tags as text, and the policies of threads.
using namespace ebbtide;
using api::guarded;
using api::require;
using api::require_given;
using api::with_core;

static_assert(static_cast<int>(Tagging::kUnset) == EBBTIDE_TAGGING_UNSET);
static_assert(static_cast<int>(Tagging::kOff) == EBBTIDE_TAGGING_OFF);
static_assert(static_cast<int>(Tagging::kOn) == EBBTIDE_TAGGING_ON);
static_assert(kTagBytesMax == EBBTIDE_TAG_MAX);

namespace {

const SettingFacts& setting_of(const char* name) {
  require_given(name, "name");
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

// Writes text and a NUL to `to`, unless that is null, and its length to *length, unless that is null.
void write_text(const std::string& text, char* to, size_t capacity, size_t* length) {
  require(to == nullptr || text.size() < capacity, "the value is longer than the room for it");
  if (to != nullptr) std::memcpy(to, text.c_str(), text.size() + 1);
  if (length != nullptr) *length = text.size();
}

std::string check(const SettingFacts& facts, std::string_view text, const char* label) {
  std::string checked = check_setting(facts, text, label == nullptr ? facts.name : label);
  if (facts.id == Setting::kDiskDirectory) check_disk_directory(checked);
  return checked;
}

ThreadPolicy read(const ebbtide_thread_policy& given) {
  require(given.tagging >= EBBTIDE_TAGGING_UNSET && given.tagging <= EBBTIDE_TAGGING_ON,
          "tagging is 0 (unset), 1 (off) or 2 (on)");
  require(std::memchr(given.tag, '\0', sizeof given.tag) != nullptr, "the tag does not end with NUL");
  ThreadPolicy policy{.tagging = static_cast<Tagging>(given.tagging),
                      .backup = api::read_backup(given.backup),
                      .retain = given.retain,
                      .lease = given.lease};
  std::memcpy(policy.tag.data(), given.tag, sizeof given.tag);
  return policy;
}

void show(const ThreadPolicy& policy, ebbtide_thread_policy* to) {
  require_given(to, "policy");
  to->tagging = static_cast<int32_t>(policy.tagging);
  to->backup = static_cast<int32_t>(policy.backup);
  to->retain = policy.retain;
  to->lease = policy.lease;
  std::memcpy(to->tag, policy.tag.data(), sizeof to->tag);
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_visit_settings(ebbtide_visit_setting visit, void* user, ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(visit, "visit");
    for (const SettingFacts& facts : all_settings()) {
      const std::string source = source_of(facts.id);
      const std::string problem = problem_of(facts.id, source);
      if (!problem.empty()) set_said(facts.id);
      const ebbtide_setting shown = {
          facts.name,    facts.variable, name_of(facts.kind),   facts.values,        facts.fallback, facts.readers,
          facts.meaning, facts.none,     facts.is_configurable, facts.is_run_option, source.c_str(), problem.c_str()};
      visit(user, &shown);
    }
  });
}

ebbtide_status ebbtide_check_setting(const char* name, const char* text, size_t size, const char* label, char* checked,
                                     size_t capacity, size_t* length, ebbtide_error* error) {
  return guarded(error, [&] {
    const SettingFacts& facts = setting_of(name);
    require_given(text, "text");
    write_text(check(facts, {text, size}, label), checked, capacity, length);
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
  return with_core(error, [&](Core& core) {
    const SettingFacts& facts = setting_of(name);
    require(facts.is_configurable, "this setting can't be configured: only its variable sets it");
    const auto plain = value == nullptr ? std::nullopt : std::optional(check_setting(facts, value, facts.name));
    configure_setting(core, facts.id, plain);
  });
}

ebbtide_status ebbtide_get_setting(const char* name, char* value, size_t capacity, size_t* length,
                                   ebbtide_error* error) {
  return with_core(error,
                   [&](Core& core) { write_text(show_setting(core, setting_of(name).id), value, capacity, length); });
}

ebbtide_status ebbtide_check_tag(const char* text, size_t size, ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(text, "text");
    check_tag_name({text, size});
  });
}

ebbtide_status ebbtide_encode_tag(const char* text, size_t size, char* tag, ebbtide_error* error) {
  return guarded(error, [&] {
    require(text != nullptr && tag != nullptr, "text or tag is null");
    write_text(encode_tag({text, size}), tag, EBBTIDE_TAG_MAX + 1, nullptr);
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

ebbtide_status ebbtide_set_thread_policy(const ebbtide_thread_policy* policy, ebbtide_error* error) {
  return guarded(error, [&] { set_thread_policy(policy == nullptr ? ThreadPolicy{} : read(*policy)); });
}

ebbtide_status ebbtide_get_thread_policy(ebbtide_thread_policy* policy, ebbtide_error* error) {
  return guarded(error, [&] { show(thread_policy(), policy); });
}

ebbtide_status ebbtide_get_program_policy(ebbtide_thread_policy* policy, ebbtide_error* error) {
  return guarded(error, [&] { show(program_policy(), policy); });
}

}  // extern "C"
