#include "base/error.h"
#include "base/log.h"
#include "base/log_throttle.h"
#include "core/state/core.h"
#include "preload/allocate.h"
#include "preload/hook_call.h"

// Access of one device to another's memory. The driver knows it for its own memory; ebbtide must set it for the memory
// that it mapped.
using namespace ebbtide::preload;

namespace {

// The driver has already said yes to the program. A copy through the host needs no access; other uses fail, and stderr
// has the reason.
void grant_to(int device) noexcept {
  static constinit ebbtide::LogThrottle throttle;
  try {
    if (is_countable(device)) ebbtide::Core::instance().peers.enable(device);
  } catch (const std::exception& error) {
    if (throttle.allows()) {
      ebbtide::log_line(
          ebbtide::LogLevel::kError,
          {"cuCtxEnablePeerAccess: the device got no access to some of what ebbtide placed: ", error.what()});
    }
  }
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  return call_hook<&cuCtxEnablePeerAccess>(
      [&](auto native) {
        const CUresult result = native();
        if (result == CUDA_SUCCESS) grant_to(current_device());
        return result;
      },
      peer, flags);
}
