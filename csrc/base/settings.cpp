#include "base/settings.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>

#include "base/error.h"
#include "base/log.h"

namespace ebbtide {
namespace {

constexpr unsigned kVariableOnly = 0;
constexpr unsigned kConfigure = 1;
constexpr unsigned kRun = 2;

constexpr SettingFacts kSettings[] = {
#define EBBTIDE_SETTING(id, name, variable, kind, values, fallback, readers, given, none, meaning)                   \
  {Setting::id,           name, variable, SettingKind::kind, values, fallback, readers, ((given) & kConfigure) != 0, \
   ((given) & kRun) != 0, none, meaning},
#include "base/settings.def"
#undef EBBTIDE_SETTING
};
constexpr size_t kCount = std::size(kSettings);

using Flags = std::array<std::atomic<bool>, kCount>;
constinit Flags said{};
constinit Flags configured{};

std::atomic<bool>& flag_of(Flags& flags, Setting setting) noexcept { return flags[static_cast<size_t>(setting)]; }

}  // namespace

std::span<const SettingFacts> all_settings() noexcept { return kSettings; }

const SettingFacts& facts_of(Setting setting) noexcept { return kSettings[static_cast<size_t>(setting)]; }

const SettingFacts* find_setting(std::string_view name) noexcept {
  for (const SettingFacts& facts : kSettings) {
    if (name == facts.name) return &facts;
  }
  return nullptr;
}

const char* name_of(SettingKind kind) noexcept {
  constexpr const char* kNames[] = {"size", "switch", "choice", "count", "tag", "folder", "file"};
  return kNames[static_cast<size_t>(kind)];
}

const char* variable_text(Setting setting) noexcept {
  const char* text = std::getenv(facts_of(setting).variable);
  return text == nullptr || *text == '\0' ? nullptr : text;
}

std::string variable_problem(Setting setting) {
  const char* text = variable_text(setting);
  if (text == nullptr) return "";
  try {
    check_setting(facts_of(setting), text, facts_of(setting).variable);
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

std::optional<std::string> read_variable(Setting setting) {
  const char* text = variable_text(setting);
  if (text == nullptr) return std::nullopt;
  const std::string problem = variable_problem(setting);
  if (problem.empty()) return check_setting(facts_of(setting), text, "");
  if (!set_said(setting)) log_line(LogLevel::kError, {problem, "; it is ignored"});
  return std::nullopt;
}

std::optional<uint64_t> read_number(Setting setting) {
  const auto text = read_variable(setting);
  uint64_t number = 0;
  if (!text || std::from_chars(text->data(), text->data() + text->size(), number).ec != std::errc())
    return std::nullopt;
  return number;
}

bool read_switch(Setting setting, bool otherwise) {
  const auto text = read_variable(setting);
  return text ? *text == "1" : otherwise;
}

void say_malformed_variables() {
  for (const SettingFacts& facts : kSettings) {
    if (facts.readers != std::string_view("simulator")) read_variable(facts.id);
  }
}

bool set_said(Setting setting) noexcept { return flag_of(said, setting).exchange(true); }

void set_configured(Setting setting, bool is_set) noexcept { flag_of(configured, setting).store(is_set); }
bool is_configured(Setting setting) noexcept { return flag_of(configured, setting).load(); }

std::string source_of(Setting setting) {
  const SettingFacts& facts = facts_of(setting);
  if (is_configured(setting)) return "configured";
  return variable_text(setting) != nullptr && variable_problem(setting).empty() ? facts.variable : "default";
}

std::string how_to_change(Setting setting) {
  const SettingFacts& facts = facts_of(setting);
  if (is_configured(setting)) return facts.name;
  std::string option = facts.is_run_option ? std::string(", --") + facts.name : "";
  std::replace(option.begin(), option.end(), '_', '-');
  return std::string(facts.name) + " (" + facts.variable + option + ")";
}

}  // namespace ebbtide
