#include "driver/context.h"

#include <atomic>
#include <mutex>

#include "base/error.h"
#include "base/log.h"

namespace ebbtide {
namespace {

thread_local int relaxed_count = 0;

constinit std::mutex retaining;
constinit std::atomic<CUcontext> primary_contexts[kMaxDevices]{};
constinit std::atomic<int> last_count{-1};  // not asked yet

}  // namespace

size_t device_index(int device) {
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("there is no device " + std::to_string(device));
  return static_cast<size_t>(device);
}

int device_count() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  last_count.store(count, std::memory_order_relaxed);
  return count;
}

int known_device_count() {
  const int count = last_count.load(std::memory_order_relaxed);
  return count >= 0 ? count : device_count();
}

CUcontext primary_context(int device) {
  const Driver& table = driver();
  std::atomic<CUcontext>& slot = primary_contexts[device_index(device)];
  if (CUcontext context = slot.load(std::memory_order_acquire)) return context;
  const std::lock_guard lock(retaining);
  if (CUcontext context = slot.load()) return context;
  const int count = device_count();
  if (device >= count) {
    throw InvalidArgument("there is no device " + std::to_string(device) + ": this process sees " +
                          std::to_string(count));
  }
  CUcontext context = nullptr;
  check(table.cuDevicePrimaryCtxRetain(&context, device_handle(device)), "cuDevicePrimaryCtxRetain",
        "device=" + std::to_string(device));
  slot.store(context, std::memory_order_release);
  return context;
}

ContextScope::ContextScope(int device) {
  const Driver& table = driver();
  CUcontext wanted = primary_context(device);
  check(table.cuCtxGetCurrent(&previous_), "cuCtxGetCurrent");
  if (previous_ == wanted) return;
  check(table.cuCtxSetCurrent(wanted), "cuCtxSetCurrent", "device=" + std::to_string(device));
  has_changed_ = true;
}

ContextScope::~ContextScope() {
  if (!has_changed_) return;
  const CUresult result = driver().cuCtxSetCurrent(previous_);
  if (!is_undone(result)) {
    log_line(LogLevel::kWarning,
             {"cuCtxSetCurrent failed with ", result_name(result), " on the way back to the caller's context"});
  }
}

RelaxedCaptureMode::RelaxedCaptureMode() noexcept {
  ++relaxed_count;
  const Driver* const table = driver_if_loaded();
  has_changed_ = table != nullptr && table->cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
}

bool RelaxedCaptureMode::is_on() noexcept { return relaxed_count > 0; }

RelaxedCaptureMode::~RelaxedCaptureMode() {
  --relaxed_count;
  if (has_changed_) driver().cuThreadExchangeStreamCaptureMode(&mode_);
}

void synchronize_device(int device) {
  const ContextScope scope(device);
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize", "device=" + std::to_string(device));
}

}  // namespace ebbtide
