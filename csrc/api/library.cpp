#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "core/allocate/room.h"
#include "core/probe/capabilities.h"
#include "driver/context.h"

// The library, its driver and devices.
using namespace ebbtide;
using api::guarded;
using api::require_given;
using api::with_core;

extern "C" {

uint32_t ebbtide_api_version(void) { return EBBTIDE_API_VERSION; }
const char* ebbtide_version(void) { return EBBTIDE_VERSION; }
const char* ebbtide_build(void) { return EBBTIDE_BUILD; }

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
bool ebbtide_is_simulated(void) { return is_driver_simulated(); }

ebbtide_status ebbtide_device_count(int32_t* count, ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(count, "count");
    require_not_forked();
    *count = device_count();
  });
}

ebbtide_status ebbtide_driver_version(int32_t* version, ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(version, "version");
    require_not_forked();
    int value = 0;
    check(driver().cuDriverGetVersion(&value), "cuDriverGetVersion");
    *version = value;
  });
}

ebbtide_status ebbtide_query_device(int32_t device, ebbtide_device_info* info, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(info, "info");
    const DeviceFacts facts = describe_device(device);
    ebbtide_device_info filled{};
    filled.device = device;
    filled.compute_capability = facts.compute_capability;
    api::copy_text(filled.name, sizeof filled.name, facts.name.c_str());
    std::copy(facts.uuid.begin(), facts.uuid.end(), filled.uuid);
    filled.total_bytes = facts.total_bytes;
    filled.free_bytes = facts.free_bytes;
    filled.granularity_bytes = facts.granularity_bytes;
    filled.held_bytes = core.budgets.device.held_bytes(device);
    filled.limit_bytes = core.budgets.device.limit_bytes();
    filled.peak_bytes = core.budgets.device.peak_bytes(device);
    filled.room_bytes = usable_device_bytes(core, device, kUnlimited);
    *info = filled;
  });
}

ebbtide_status ebbtide_visit_capabilities(int32_t device, ebbtide_visit_capability visit, void* user,
                                          ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(visit, "visit");
    require_not_forked();
    for (const Capability& capability : probe_capabilities(device)) {
      visit(user, capability.name.c_str(), capability.is_available, capability.found.c_str(),
            capability.advice.c_str());
    }
  });
}

}  // extern "C"
