// The last resort, where an allocation finds no room and nothing can leave any more: memory with a tag of its own, of
// which as much lies on the host as does not fit on the device. The device reaches it there over the bus. It never
// moves, and is freed with its tensor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ebbtide::lms {

class Overflow {
 public:
  static Overflow& instance();  // leaked: an allocation may come at any time

  void allow(bool is_allowed) { is_allowed_.store(is_allowed); }
  // Null where that is not allowed, for a load ahead of need, and where the host has no room either. Free it with
  // ebbtide_slot_free().
  void* take(int device, size_t size_bytes) noexcept;
  static bool has(const void* address) noexcept;
  uint64_t taken_bytes() const { return taken_bytes_.load(); }
  void reset_statistics() { taken_bytes_.store(0); }

 private:
  std::atomic<bool> is_allowed_{false};
  std::atomic<uint64_t> taken_bytes_{0};
};

}  // namespace ebbtide::lms
