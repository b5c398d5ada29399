#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "base/bytes.h"

// How much memory may be pinned: staging rings, pinned backups, evicted memory. The host budget counts the same memory.
// This is a second limit for the user, since pinned memory can't be swapped out and burdens other users of the machine.
namespace ebbtide {

class PinnedBudget;

// Owns a charge; gives it back when it goes.
class PinnedCharge {
 public:
  PinnedCharge() = default;
  PinnedCharge(PinnedCharge&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  PinnedCharge& operator=(PinnedCharge&& other) noexcept;
  ~PinnedCharge() { reset(); }
  void merge(PinnedCharge&& other) noexcept;
  void reset() noexcept;
  // The memory stays pinned for ever, and counts for ever.
  void keep_for_good() noexcept;

 private:
  friend class PinnedBudget;
  PinnedCharge(PinnedBudget* budget, uint64_t size_bytes) : budget_(budget), size_bytes_(size_bytes) {}
  PinnedBudget* budget_ = nullptr;
  uint64_t size_bytes_ = 0;
};

class PinnedBudget {
 public:
  // Throws StoreError naming need, free and limit. purpose: "the pinned backup".
  PinnedCharge charge(uint64_t size_bytes, const std::string& purpose);
  uint64_t held_bytes() const { return held_bytes_.load(); }
  // Of which nobody can give back any more.
  uint64_t lost_bytes() const { return lost_bytes_.load(); }
  uint64_t limit_bytes() const { return limit_bytes_.load(); }
  void set_limit(uint64_t bytes) { limit_bytes_.store(bytes); }

 private:
  friend class PinnedCharge;
  std::atomic<uint64_t> held_bytes_{0};
  std::atomic<uint64_t> lost_bytes_{0};
  std::atomic<uint64_t> limit_bytes_{kUnlimited};
};

}  // namespace ebbtide
