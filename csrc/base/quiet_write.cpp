#include "base/quiet_write.h"

#include <pthread.h>

#include <ctime>

namespace ebbtide {

// What is pending already, the program has blocked and will see once in any case.
HeldSignals::HeldSignals() noexcept {
  sigset_t pending;
  ::sigemptyset(&ours_);
  ::sigpending(&pending);
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    if (::sigismember(&pending, signal) == 0) ::sigaddset(&ours_, signal);
  }
  is_held_ = ::pthread_sigmask(SIG_BLOCK, &ours_, &before_) == 0;
}

HeldSignals::~HeldSignals() {
  const int error = errno;
  if (is_held_) ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

void HeldSignals::take_it() noexcept {
  const int error = errno;
  constexpr timespec kNow = {0, 0};
  while (is_held_ && ::sigtimedwait(&ours_, nullptr, &kNow) < 0 && errno == EINTR) {
  }
  errno = error;
}

}  // namespace ebbtide
