#include "preload/known_captures.h"

#include <algorithm>

#include "core/saver.h"

namespace ebbtide::preload {

void KnownCaptures::begin(CUstream stream) {
  {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  }
  Saver::instance().capture_gate.begin_capture();
}

bool KnownCaptures::forget(CUstream stream) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found == streams_.end()) return false;
  streams_.erase(found);
  return true;
}

void KnownCaptures::end(CUstream stream) noexcept {
  if (!forget(stream)) return;
  Saver::instance().capture_gate.end_capture();
  Saver::instance().give_back_caches();
}

KnownCaptures& known_captures() {
  static auto* const instance = new KnownCaptures;
  return *instance;
}

}  // namespace ebbtide::preload
