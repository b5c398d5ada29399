#include "core/memory/capture_gate.h"

#include "base/error.h"
#include "driver/context.h"

namespace ebbtide {

CaptureGate::Permit::~Permit() {
  if (gate_ == nullptr) return;
  const std::lock_guard lock(gate_->mutex_);
  --gate_->permits_;
  gate_->changed_.notify_all();
}

std::optional<CaptureGate::Permit> CaptureGate::try_enter() {
  const std::lock_guard lock(mutex_);
  if (captures_ > 0) return std::nullopt;
  ++permits_;
  return Permit(this);
}

void CaptureGate::begin_capture() {
  std::unique_lock lock(mutex_);
  ++captures_;  // from here on no new permit is given, so that the wait ends
  changed_.wait(lock, [&] { return permits_ == 0; });
}

void CaptureGate::end_capture() {
  const std::lock_guard lock(mutex_);
  if (captures_ == 0) throw StateError("no capture was begun");
  --captures_;
}

bool CaptureGate::is_capturing() const {
  const std::lock_guard lock(mutex_);
  return captures_ > 0;
}

bool is_capture_visible(int device, void* stream) noexcept {
  try {
    const ContextScope scope(device);
    // Asking the legacy stream is harmless: it answers 906 where a blocking stream captures.
    for (CUstream asked : {static_cast<CUstream>(stream), static_cast<CUstream>(CU_STREAM_LEGACY)}) {
      if (asked == nullptr) continue;
      CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
      const CUresult result = driver().cuStreamIsCapturing(asked, &status);
      if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
      if (result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE) return true;
    }
  } catch (...) {
    // A driver that does not answer is not capturing; the next call to it will name the error.
  }
  return false;
}

}  // namespace ebbtide
