#pragma once

#include <pthread.h>

namespace ebbtide::preload {

// While one lives, its thread is not cancelled: a cancellation is an unwinding that ends the process where it meets a noexcept function (invariant 4). One that comes meanwhile is done at the next point after it.
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
