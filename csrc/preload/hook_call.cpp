#include "preload/hook_call.h"

#include <atomic>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "core/state/core.h"
#include "driver/driver.h"

namespace ebbtide::preload {
namespace {

// In the static TLS block, so that its first use in a thread needs no memory.
__attribute__((tls_model("initial-exec"))) thread_local constinit int depth = 0;

void note_forked_child() noexcept {
  static constinit std::atomic<bool> is_said{false};
  if (is_said.exchange(true)) return;
  log_line(LogLevel::kWarning,
           {"the parent of this forked process used CUDA: ebbtide does nothing here, and the driver refuses all work. "
            "Start workers with spawn or forkserver"});
}

}  // namespace

HookScope::HookScope() noexcept : may_act_(depth == 0 && is_active() && driver_kind() != DriverKind::kSim) {
  if (may_act_ && is_forked_child()) {
    note_forked_child();
    may_act_ = false;
  }
  ++depth;
}
HookScope::~HookScope() { --depth; }

CUresult code_of_exception(const char* call) noexcept {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    log_line(LogLevel::kError, {call, ": ", error.what()});
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const StoreError& error) {
    log_line(LogLevel::kError, {call, ": ", error.what()});
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::bad_alloc&) {
    log_line(LogLevel::kError, {call, ": the process has no host memory left"});
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const DriverError& error) {
    log_line(LogLevel::kWarning, {call, ": ", error.what()});
    return static_cast<CUresult>(error.code);
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, {call, ": ", error.what()});
    return CUDA_ERROR_UNKNOWN;
  } catch (...) {
    return CUDA_ERROR_UNKNOWN;
  }
}

}  // namespace ebbtide::preload
