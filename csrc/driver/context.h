#pragma once

#include "driver/driver.h"

namespace ebbtide {

inline constexpr int kMaxDevices = 128;
// Throws InvalidArgument for what can't be a device's ordinal.
size_t device_index(int device);

// The primary context of a device, which torch and cudart use too. It is retained once for each device and process, and
// never released.
CUcontext primary_context(int device);

int device_count();
// The last result of device_count(): the number of devices does not change while a process lives.
int known_device_count();

// Makes a device's primary context current in this thread for a scope, and restores the previous one. Costs one
// cuCtxGetCurrent if it is current already.
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

// While it lives, this thread may pin, query and wait for streams of ebbtide's own while another thread captures. The
// capture does not break, unless it is a capture of that stream. For places where a capture can't be detected or must
// not be waited for.
// Does nothing if the driver lacks the call.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() noexcept;
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;
  ~RelaxedCaptureMode();
  // Whether the calling thread is in it: threads that work for it should be, too.
  static bool is_on() noexcept;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool has_changed_ = false;
};

// Waits for all work queued on the device. The caller makes sure that no capture is under way, because the call would
// break it.
void synchronize_device(int device);

}  // namespace ebbtide
