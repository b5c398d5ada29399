#pragma once

#include <atomic>
#include <memory>

namespace ebbtide {

// Whether there is another holder. False makes visible what the last of the others did to it before letting go:
// use_count() alone orders nothing.
template <typename Value>
bool is_shared(const std::shared_ptr<Value>& pointer) {
  if (pointer.use_count() > 1) return true;
#ifndef __SANITIZE_THREAD__  // which knows no fences
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
  return false;
}

}  // namespace ebbtide
