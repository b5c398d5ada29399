#pragma once

#include <pthread.h>

namespace ebbtide::preload {

// While one lives, its thread is not cancelled. Cancellation unwinds the stack, which ends the process at a noexcept
// function (invariant 4). A cancellation that arrives meanwhile happens at the next cancellation point after it.
class NoCancel {
 public:
  NoCancel() noexcept { ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  NoCancel(const NoCancel&) = delete;
  NoCancel& operator=(const NoCancel&) = delete;
  ~NoCancel() { ::pthread_setcancelstate(before_, nullptr); }

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace ebbtide::preload
