#include "core/state/core_settings.h"

#include <array>
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

double fraction_of(const std::string& text) {
  double fraction = 0;
  std::from_chars(text.data(), text.data() + text.size(), fraction);
  return fraction;
}

void set_folder(const std::optional<std::string>& text) {
  if (text) check_disk_directory(*text);
  set_disk_directory(text.value_or(""));
}

void apply(Core& core, Setting setting, const std::optional<std::string>& text) {
  const bool is_on = text == "1";
  switch (setting) {
    case Setting::kDeviceLimit: return core.budgets.device.set_limit(size_of(text));
    case Setting::kDeviceMargin: return core.budgets.device_margin.set_bytes(size_of(text));
    case Setting::kHostLimit: return core.budgets.host.set_limit(size_of(text));
    case Setting::kHostMargin: return core.budgets.host.set_margin(size_of(text));
    case Setting::kPinnedLimit: return core.budgets.pinned.set_limit(size_of(text));
    case Setting::kReserve: return core.rules.overflow.reserve_bytes.store(size_of(text));
    case Setting::kHostPool: return core.host_pool.set_capacity(size_of(text));
    case Setting::kSharedHandle: return core.rules.shared_handle_bytes.store(size_of(text));
    case Setting::kWholeFraction: return core.rules.overflow.whole_fraction.store(fraction_of(text.value_or("")));
    case Setting::kSkipClean: return core.rules.skip.clean.store(is_on);
    case Setting::kSkipUnused: return core.rules.skip.unused.store(is_on);
    case Setting::kSkipConstant: return core.rules.skip.constant.store(is_on);
    case Setting::kCompareBytes: return core.rules.skip.must_compare.store(is_on);
    case Setting::kPoison: return core.rules.must_poison.store(is_on);
    case Setting::kCopyAhead: return core.rules.keeps_ahead.store(is_on);
    case Setting::kDiskDirectory: return set_folder(text);
    case Setting::kDiskFiles: return set_disk_files(text == "named" ? DiskFiles::kNamed : DiskFiles::kHidden);
    default:
      throw InvalidArgument(std::string(facts_of(setting).name) + " can't be configured: only " +
                            facts_of(setting).variable + " sets it");
  }
}

std::string text_of(uint64_t bytes) { return bytes == kUnlimited ? "" : std::to_string(bytes); }

std::string text_of(bool is_on) { return is_on ? "1" : "0"; }

std::string text_of(double fraction) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), fraction).ptr};
}

}  // namespace

std::string show_setting(Core& core, Setting setting) {
  switch (setting) {
    case Setting::kDeviceLimit: return text_of(core.budgets.device.own_limit_bytes());
    case Setting::kDeviceMargin: return text_of(core.budgets.device_margin.bytes());
    case Setting::kHostLimit: return text_of(core.budgets.host.own_limit_bytes());
    case Setting::kHostMargin: return text_of(core.budgets.host.margin_bytes());
    case Setting::kPinnedLimit: return text_of(core.budgets.pinned.limit_bytes());
    case Setting::kReserve: return text_of(core.rules.overflow.reserve_bytes.load());
    case Setting::kHostPool: return text_of(core.host_pool.capacity_bytes());
    case Setting::kSharedHandle: return text_of(core.rules.shared_handle_bytes.load());
    case Setting::kWholeFraction: return text_of(core.rules.overflow.whole_fraction.load());
    case Setting::kSkipClean: return text_of(core.rules.skip.clean.load());
    case Setting::kSkipUnused: return text_of(core.rules.skip.unused.load());
    case Setting::kSkipConstant: return text_of(core.rules.skip.constant.load());
    case Setting::kCompareBytes: return text_of(core.rules.skip.must_compare.load());
    case Setting::kPoison: return text_of(core.rules.must_poison.load());
    case Setting::kCopyAhead: return text_of(core.rules.keeps_ahead.load());
    case Setting::kDiskDirectory: return chosen_disk_directory();
    case Setting::kDiskFiles: return disk_files() == DiskFiles::kNamed ? "named" : "hidden";
    default:
      throw InvalidArgument(std::string(facts_of(setting).name) + " can't be configured: only " +
                            facts_of(setting).variable + " sets it");
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
