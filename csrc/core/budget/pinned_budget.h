#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "core/budget/charge.h"

// How much memory may be pinned: staging rings, pinned backups, evicted memory. The host budget counts the same memory.
// This is a second limit for the user, since pinned memory can't be swapped out and burdens other users of the machine.
namespace ebbtide {

struct PinnedPart {
  uint64_t bytes = 0;
  uint64_t size_bytes() const { return bytes; }
  void add(const PinnedPart& other) noexcept { bytes += other.bytes; }
};
using PinnedCharge = Charge<class PinnedBudget, PinnedPart>;

class PinnedBudget {
 public:
  // Throws StoreError naming need, free and limit. purpose: "the pinned backup".
  PinnedCharge charge(uint64_t size_bytes, const std::string& purpose);
  uint64_t held_bytes() const { return held_bytes_.load(); }
  // The part of it that can't be given back any more. Tests need it: only so do their books match exactly.
  uint64_t lost_bytes() const { return lost_bytes_.load(); }
  uint64_t limit_bytes() const { return limit_bytes_.load(); }
  void set_limit(uint64_t bytes) { limit_bytes_.store(bytes); }

 private:
  friend PinnedCharge;
  void give_back(const PinnedPart& part) noexcept { held_bytes_.fetch_sub(part.bytes); }
  void lose(const PinnedPart& part) noexcept { lost_bytes_.fetch_add(part.bytes); }
  std::atomic<uint64_t> held_bytes_{0};
  std::atomic<uint64_t> lost_bytes_{0};
  std::atomic<uint64_t> limit_bytes_{kUnlimited};
};

}  // namespace ebbtide
