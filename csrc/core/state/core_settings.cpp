#include "core/state/core_settings.h"

#include <charconv>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "core/state/core.h"
#include "store/disk_directory.h"

namespace ebbtide {
namespace {

uint64_t size_of(const std::optional<std::string>& text) {
  uint64_t bytes = kUnlimited;
  if (text) std::from_chars(text->data(), text->data() + text->size(), bytes);
  return bytes;
}

void set_folder(const std::optional<std::string>& text) {
  if (text) check_disk_directory(*text);
  set_disk_directory(text.value_or(""));
}

[[noreturn]] void throw_not_configurable(Setting setting) {
  throw InvalidArgument(std::string(facts_of(setting).name) + " can't be configured: only " +
                        facts_of(setting).variable + " sets it");
}

// Calls use(value) with the setting's own atomic in the core; false where it is none.
template <typename Use>
bool use_value(Core& core, Setting setting, const Use& use) {
  Rules& rules = core.rules;
  switch (setting) {
    case Setting::kReserve: use(rules.overflow.reserve_bytes); return true;
    case Setting::kSharedHandle: use(rules.shared_handle_bytes); return true;
    case Setting::kSkipClean: use(rules.skip.clean); return true;
    case Setting::kSkipUnused: use(rules.skip.unused); return true;
    case Setting::kSkipConstant: use(rules.skip.constant); return true;
    case Setting::kPoison: use(rules.must_poison); return true;
    case Setting::kClearHanded: use(rules.clears_handed); return true;
    case Setting::kCopyAhead: use(rules.keeps_ahead); return true;
    default: return false;
  }
}

struct Parse {
  const std::optional<std::string>& text;
  void operator()(std::atomic<uint64_t>& value) const { value.store(size_of(text)); }
  void operator()(std::atomic<bool>& value) const { value.store(text == "1"); }
};

void apply(Core& core, Setting setting, const std::optional<std::string>& text) {
  if (use_value(core, setting, Parse{text})) return;
  switch (setting) {
    case Setting::kDeviceLimit: return core.budgets.device.set_limit(size_of(text));
    case Setting::kDeviceMargin: return core.budgets.device_margin.set_bytes(size_of(text));
    case Setting::kHostLimit: return core.budgets.host.set_limit(size_of(text));
    case Setting::kHostMargin: return core.budgets.host.set_margin(size_of(text));
    case Setting::kPinnedLimit: return core.budgets.pinned.set_limit(size_of(text));
    case Setting::kHostPool: return core.host_pool.set_capacity(size_of(text));
    case Setting::kDiskDirectory: return set_folder(text);
    case Setting::kDiskFiles: return set_disk_files(text == "named" ? DiskFiles::kNamed : DiskFiles::kHidden);
    default: throw_not_configurable(setting);
  }
}

std::string text_of(uint64_t bytes) { return bytes == kUnlimited ? "" : std::to_string(bytes); }

std::string text_of(bool is_on) { return is_on ? "1" : "0"; }

}  // namespace

std::string show_setting(Core& core, Setting setting) {
  std::string text;
  if (use_value(core, setting, [&](const auto& value) { text = text_of(value.load()); })) return text;
  switch (setting) {
    case Setting::kDeviceLimit: return text_of(core.budgets.device.own_limit_bytes());
    case Setting::kDeviceMargin: return text_of(core.budgets.device_margin.bytes());
    case Setting::kHostLimit: return text_of(core.budgets.host.own_limit_bytes());
    case Setting::kHostMargin: return text_of(core.budgets.host.margin_bytes());
    case Setting::kPinnedLimit: return text_of(core.budgets.pinned.limit_bytes());
    case Setting::kHostPool: return text_of(core.host_pool.capacity_bytes());
    case Setting::kDiskDirectory: return chosen_disk_directory();
    case Setting::kDiskFiles: return disk_files() == DiskFiles::kNamed ? "named" : "hidden";
    default: throw_not_configurable(setting);
  }
}

void configure_setting(Core& core, Setting setting, const std::optional<std::string>& text) {
  const SettingFacts& facts = facts_of(setting);
  if (!text && *facts.none == '\0') throw InvalidArgument(std::string(facts.name) + " can't be unset: give a value");
  apply(core, setting, text);
  set_configured(setting, text.has_value() || setting != Setting::kDiskDirectory);
}

void read_core_settings(Core& core) {
  for (const SettingFacts& facts : all_settings()) {
    // Where a backup is made, the folder's variable is read again.
    if (!facts.is_configurable || facts.id == Setting::kDiskDirectory) continue;
    const auto text = read_variable(facts.id);
    if (!text) continue;
    try {
      apply(core, facts.id, text);
    } catch (const InvalidArgument& error) {  // well-formed, and more than there is
      log_line(LogLevel::kError, {facts.variable, ": ", error.what(), "; it is ignored"});
    }
  }
}

}  // namespace ebbtide
