#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

// The settings of settings.def, and the one parser of their values. All code reads ebbtide's variables through this.
namespace ebbtide {

enum class Setting {
#define EBBTIDE_SETTING(id, ...) id,
#include "base/settings.def"
#undef EBBTIDE_SETTING
};

// kSize: "16GiB" or bytes. kSwitch: 0 or 1. kChoice: one of some words. kCount: a whole number. kTag: base/tag.h.
// kFolder, kFile: a path.
enum class SettingKind { kSize, kSwitch, kChoice, kCount, kTag, kFolder, kFile };

struct SettingFacts {
  Setting id;
  const char* name;
  const char* variable;
  SettingKind kind;
  const char* values;
  const char* fallback;
  const char* readers;
  bool is_configurable;  // by saver.configure
  bool is_run_option;
  const char* none;
  const char* meaning;
};

std::span<const SettingFacts> all_settings() noexcept;
const SettingFacts& facts_of(Setting setting) noexcept;
// Null if there is no setting of this name.
const SettingFacts* find_setting(std::string_view name) noexcept;
const char* name_of(SettingKind kind) noexcept;

// The value in its plain form: bytes, "1", a word in lower case, a path as it is. Spaces around it don't count,
// but for tags and paths. Throws InvalidArgument with one sentence that begins with
// label, which is how the caller spells the setting.
std::string check_setting(const SettingFacts& facts, std::string_view text, std::string_view label);

// --- the variables: unset and empty are the same, and as if malformed ones were not set ---

// Its text in the environment; null if it is unset or empty.
const char* variable_text(Setting setting) noexcept;
// A sentence about the variable's fault; "" if it has none.
std::string variable_problem(Setting setting);
// The value in its plain form. A malformed one is reported on stderr once, and treated as unset.
std::optional<std::string> read_variable(Setting setting);
// The same as a number of bytes, a count, or a switch.
std::optional<uint64_t> read_number(Setting setting);
bool read_switch(Setting setting, bool otherwise);
// The index of the word among the values of a choice or a switch; -1 where it is unset or malformed. Takes no memory
// and says nothing: for the log, and for what runs before a program's start.
int word_index(Setting setting) noexcept;
// Reports every malformed variable as read_variable would, except the simulator's, which it reports itself.
void say_malformed_variables();
// Another component has reported it: nothing is written about this variable from now on. Whether one had before.
bool set_said(Setting setting) noexcept;

// --- the values in force, for messages ---

void set_configured(Setting setting, bool is_set) noexcept;
bool is_configured(Setting setting) noexcept;
// "configured" (by the program), "EBBTIDE_HOST_LIMIT" or "default": what set the value that holds.
std::string source_of(Setting setting);
// What to set instead: the setting where the program has configured it, else the setting with its variable and its
// option of `ebbtide run`.
std::string how_to_change(Setting setting);

}  // namespace ebbtide
