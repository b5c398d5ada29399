#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

namespace ebbtide {

// Limits the log lines of one cause that a program may trigger in a loop: the first eight are allowed, then the 16th,
// 32nd, 64th and so on.
class LogThrottle {
 public:
  bool allows() noexcept {
    const uint64_t count = count_.fetch_add(1, std::memory_order_relaxed) + 1;
    return count <= 8 || std::has_single_bit(count);
  }

 private:
  std::atomic<uint64_t> count_{0};
};

}  // namespace ebbtide
