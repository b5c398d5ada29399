#include "api/ebbtide.h"
#include "api/guard.h"
#include "core/state/core.h"
#include "lms/evicted_memory.h"

// Large model support: the torch extension's host memory, and peaks.
using namespace ebbtide;
using api::guarded;
using api::require;

extern "C" {

ebbtide_status ebbtide_take_host_memory(uint64_t size_bytes, void** address, ebbtide_error* error) {
  return guarded(error, [&] {
    require(address != nullptr, "address is null");
    *address = nullptr;
    require_not_forked();
    *address = lms::evicted_memory().take(size_bytes);
  });
}

ebbtide_status ebbtide_give_host_memory(void* address, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    lms::evicted_memory().give_back(address);
  });
}

ebbtide_status ebbtide_reset_peaks(ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().budgets.device.reset_peaks();
  });
}

}  // extern "C"
