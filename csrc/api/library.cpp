#include <dlfcn.h>

#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "base/error.h"
#include "base/settings.h"
#include "core/allocate/room.h"
#include "core/probe/capabilities.h"
#include "core/state/core.h"
#include "core/state/core_settings.h"
#include "driver/context.h"

// The library, its driver, devices and limits.
using namespace ebbtide;
using api::guarded;
using api::require;

#ifndef EBBTIDE_VERSION
#define EBBTIDE_VERSION "0.1.0"
#endif

namespace {

Setting setting_of(ebbtide_limit limit) {
  switch (limit) {
    case EBBTIDE_DEVICE_LIMIT: return Setting::kDeviceLimit;
    case EBBTIDE_HOST_LIMIT: return Setting::kHostLimit;
    case EBBTIDE_HOST_MARGIN: return Setting::kHostMargin;
    case EBBTIDE_PINNED_LIMIT: return Setting::kPinnedLimit;
    case EBBTIDE_RESERVE: return Setting::kReserve;
    case EBBTIDE_HOST_POOL: return Setting::kHostPool;
    case EBBTIDE_SHARED_HANDLE: return Setting::kSharedHandle;
    case EBBTIDE_DEVICE_MARGIN: return Setting::kDeviceMargin;
  }
  throw InvalidArgument("unknown limit " + std::to_string(static_cast<int>(limit)));
}

Setting setting_of(ebbtide_option option) {
  switch (option) {
    case EBBTIDE_SKIP_CLEAN: return Setting::kSkipClean;
    case EBBTIDE_SKIP_UNUSED: return Setting::kSkipUnused;
    case EBBTIDE_SKIP_CONSTANT: return Setting::kSkipConstant;
    case EBBTIDE_COMPARE_BYTES: return Setting::kCompareBytes;
    case EBBTIDE_POISON: return Setting::kPoison;
    case EBBTIDE_COPY_AHEAD: return Setting::kCopyAhead;
  }
  throw InvalidArgument("unknown option " + std::to_string(static_cast<int>(option)));
}

const std::atomic<bool>& switch_of(ebbtide_option option) {
  const Rules& rules = Core::instance().rules;
  const SkipRules& skip = rules.skip;
  switch (setting_of(option)) {
    case Setting::kSkipClean: return skip.clean;
    case Setting::kSkipUnused: return skip.unused;
    case Setting::kSkipConstant: return skip.constant;
    case Setting::kPoison: return rules.must_poison;
    case Setting::kCopyAhead: return rules.keeps_ahead;
    default: return skip.must_compare;
  }
}

}  // namespace

extern "C" {

uint32_t ebbtide_api_version(void) { return EBBTIDE_API_VERSION; }
const char* ebbtide_version(void) { return EBBTIDE_VERSION; }

const char* ebbtide_library_path(void) {
  Dl_info info{};
  return ::dladdr(reinterpret_cast<const void*>(&ebbtide_library_path), &info) != 0 && info.dli_fname != nullptr
             ? info.dli_fname
             : "";
}

ebbtide_status ebbtide_use_driver(const char* name, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    use_driver(name);
  });
}
const char* ebbtide_driver_name(void) { return driver_name(); }

ebbtide_status ebbtide_device_count(int32_t* count, ebbtide_error* error) {
  return guarded(error, [&] {
    require(count != nullptr, "count is null");
    require_not_forked();
    *count = device_count();
  });
}

ebbtide_status ebbtide_driver_version(int32_t* version, ebbtide_error* error) {
  return guarded(error, [&] {
    require(version != nullptr, "version is null");
    require_not_forked();
    int value = 0;
    check(driver().cuDriverGetVersion(&value), "cuDriverGetVersion");
    *version = value;
  });
}

ebbtide_status ebbtide_query_device(int32_t device, ebbtide_device_info* info, ebbtide_error* error) {
  return guarded(error, [&] {
    require(info != nullptr, "info is null");
    api::require_size(info->struct_size, api::kLeastDeviceInfo, "ebbtide_device_info");
    require_not_forked();
    ebbtide_device_info filled = EBBTIDE_DEVICE_INFO_INIT;
    const DeviceFacts facts = describe_device(device);
    filled.device = device;
    filled.compute_capability = facts.compute_capability;
    api::copy_text(filled.name, sizeof filled.name, facts.name.c_str());
    filled.total_bytes = facts.total_bytes;
    filled.free_bytes = facts.free_bytes;
    filled.granularity_bytes = facts.granularity_bytes;
    filled.held_bytes = Core::instance().budgets.device.held_bytes(device);
    filled.limit_bytes = Core::instance().budgets.device.limit_bytes();
    filled.peak_bytes = Core::instance().budgets.device.peak_bytes(device);
    filled.room_bytes = usable_device_bytes(Core::instance(), device, kUnlimited);
    api::write_struct(info, filled, api::kLeastDeviceInfo, "ebbtide_device_info");
  });
}

ebbtide_status ebbtide_visit_capabilities(int32_t device, ebbtide_visit_capability visit, void* user,
                                          ebbtide_error* error) {
  return guarded(error, [&] {
    require(visit != nullptr, "visit is null");
    require_not_forked();
    for (const Capability& capability : probe_capabilities(device)) {
      visit(user, capability.name.c_str(), capability.is_available ? 1 : 0, capability.found.c_str(),
            capability.advice.c_str());
    }
  });
}

ebbtide_status ebbtide_set_limit(ebbtide_limit limit, uint64_t bytes, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    configure_setting(Core::instance(), setting_of(limit), std::to_string(bytes));
  });
}

ebbtide_status ebbtide_get_limit(ebbtide_limit limit, uint64_t* bytes, ebbtide_error* error) {
  return guarded(error, [&] {
    require(bytes != nullptr, "bytes is null");
    require_not_forked();
    const Core& core = Core::instance();
    switch (limit) {
      case EBBTIDE_DEVICE_LIMIT: *bytes = core.budgets.device.own_limit_bytes(); return;
      case EBBTIDE_HOST_LIMIT: *bytes = core.budgets.host.own_limit_bytes(); return;
      case EBBTIDE_HOST_MARGIN: *bytes = core.budgets.host.margin_bytes(); return;
      case EBBTIDE_PINNED_LIMIT: *bytes = core.budgets.pinned.limit_bytes(); return;
      case EBBTIDE_RESERVE: *bytes = core.rules.overflow.reserve_bytes.load(); return;
      case EBBTIDE_HOST_POOL: *bytes = core.host_pool.capacity_bytes(); return;
      case EBBTIDE_SHARED_HANDLE: *bytes = core.rules.shared_handle_bytes.load(); return;
      case EBBTIDE_DEVICE_MARGIN: *bytes = core.budgets.device_margin.bytes(); return;
    }
    throw InvalidArgument("unknown limit " + std::to_string(static_cast<int>(limit)));
  });
}

ebbtide_status ebbtide_set_whole_fraction(double fraction, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    const SettingFacts& facts = facts_of(Setting::kWholeFraction);
    std::array<char, 64> digits{};  // not std::to_string, which writes the locale's decimal point
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), fraction).ptr;
    const std::string plain = check_setting(facts, {digits.data(), end}, facts.name);
    configure_setting(Core::instance(), facts.id, plain);
  });
}

ebbtide_status ebbtide_get_whole_fraction(double* fraction, ebbtide_error* error) {
  return guarded(error, [&] {
    require(fraction != nullptr, "fraction is null");
    require_not_forked();
    *fraction = Core::instance().rules.overflow.whole_fraction.load();
  });
}

ebbtide_status ebbtide_fill_host_pool(int32_t device, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().host_pool.fill(device);
  });
}

ebbtide_status ebbtide_set_option(ebbtide_option option, int32_t value, ebbtide_error* error) {
  return guarded(error, [&] {
    require(value == 0 || value == 1, "an option is 0 or 1");
    require_not_forked();
    configure_setting(Core::instance(), setting_of(option), std::to_string(value));
  });
}

ebbtide_status ebbtide_get_option(ebbtide_option option, int32_t* value, ebbtide_error* error) {
  return guarded(error, [&] {
    require(value != nullptr, "value is null");
    require_not_forked();
    *value = switch_of(option).load() ? 1 : 0;
  });
}

ebbtide_status ebbtide_set_disk_directory(const char* path, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    const SettingFacts& facts = facts_of(Setting::kDiskDirectory);
    const auto plain = path == nullptr ? std::nullopt : std::optional(check_setting(facts, path, facts.name));
    configure_setting(Core::instance(), facts.id, plain);
  });
}

}  // extern "C"
