#pragma once

#include "driver/driver.h"

namespace ebbtide {

inline constexpr int kMaxDevices = 128;

// The primary context of a device, retained once per device and process and never released: torch and cudart use the same one.
CUcontext primary_context(int device);

int device_count();
// As device_count() said last: devices neither come nor go while a process lives.
int known_device_count();

// Makes a device's primary context current in this thread for a scope, and puts back what was there. Costs one cuCtxGetCurrent where nothing changes.
class ContextScope {
 public:
  explicit ContextScope(int device);
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope();

 private:
  CUcontext previous_ = nullptr;
  bool has_changed_ = false;
};

// While it lives this thread may ask after a stream of our own beside a capture of another thread: the capture does not break, as long as it is not the stream's. For where a capture can't be seen, or must
// not be waited for. Does nothing where the driver lacks the call.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() noexcept;
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;
  ~RelaxedCaptureMode();

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool has_changed_ = false;
};

// Waits for everything that is queued on the device. The caller makes sure that no capture is under way: this would break it.
void synchronize_device(int device);

}  // namespace ebbtide
