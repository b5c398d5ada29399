#pragma once

#include <sys/types.h>

#include <cerrno>
#include <csignal>

namespace ebbtide {

// The signals of a write that fails, held back in this thread.
class HeldSignals {
 public:
  HeldSignals() noexcept;
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;
  ~HeldSignals();           // errno stays
  void take_it() noexcept;  // what the write has caused

 private:
  sigset_t ours_, before_;
  bool is_held_;
};

// A write to a file that is not the program's: where nothing reads it, or it may not grow, no signal ends the process.
// What `write` returns, and errno, tell.
template <typename Write>
ssize_t write_quietly(Write write) noexcept {
  HeldSignals held;
  const ssize_t written = write();
  if (written < 0 && (errno == EPIPE || errno == EFBIG)) held.take_it();
  return written;
}

}  // namespace ebbtide
