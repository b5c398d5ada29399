#include "preload/known_captures.h"

#include <algorithm>

#include "core/state/core.h"
#include "core/state/shortage.h"

namespace ebbtide::preload {

void KnownCaptures::begin(CUstream stream) {
  CaptureGate& gate = Core::instance().capture_gate;
  gate.begin_capture();
  try {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  } catch (...) {
    gate.end_capture();
    throw;
  }
}

bool KnownCaptures::forget(CUstream stream) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found == streams_.end()) return false;
  streams_.erase(found);
  return true;
}

void KnownCaptures::put_back(CUstream stream) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  } catch (...) {
    // Another thread has taken the place, and there is no memory for another one: its end is not waited for.
    end_forgotten();
  }
}

void KnownCaptures::end(CUstream stream) noexcept {
  if (forget(stream)) end_forgotten();
}

void KnownCaptures::end_forgotten() noexcept {
  Core::instance().capture_gate.end_capture();
  give_back_caches(Core::instance());
}

KnownCaptures& known_captures() {
  static auto* const instance = new KnownCaptures;
  return *instance;
}

}  // namespace ebbtide::preload
