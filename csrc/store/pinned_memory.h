#pragma once

#include <atomic>
#include <utility>

#include "driver/driver.h"
#include "store/anonymous_memory.h"

namespace ebbtide {

// Owns memory that is first touched and then pinned, for all devices. This is many times faster than memory that the
// driver allocates pinned (csrc/DESIGN.md, F28).
class PinnedMemory {
 public:
  // Pins nothing yet.
  explicit PinnedMemory(AnonymousMemory memory) : memory_(std::move(memory)) {}
  PinnedMemory(PinnedMemory&& other) noexcept
      : memory_(std::move(other.memory_)),
        is_pinned_(other.is_pinned_.exchange(false)),
        is_abandoned_(other.is_abandoned_.load()) {}
  PinnedMemory& operator=(PinnedMemory&&) = delete;
  // Memory that the device may still use is never unmapped.
  ~PinnedMemory();

  // Whether the driver has the calls.
  static bool can_pin();
  CUresult try_pin();
  bool is_pinned() const { return is_pinned_.load(); }  // by any thread
  // The device may use it for ever: it stays pinned and mapped after its owner. By any thread.
  void abandon() noexcept { is_abandoned_.store(true); }
  bool is_abandoned() const { return is_abandoned_.load(); }
  const AnonymousMemory& memory() const { return memory_; }
  std::byte* bytes() const { return memory_.bytes(); }

 private:
  AnonymousMemory memory_;
  std::atomic<bool> is_pinned_{false};
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace ebbtide
