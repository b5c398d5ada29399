#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/budget/host_budget.h"
#include "kernels/blocks.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

// Host memory that holds the bytes that a chunk had when it came from there to the device. As long as the chunk has not
// changed, it can go back without a copy.
struct HostTwin {
  HostCharge charge;
  PhysicalMemory memory;  // nothing: the twin is gone
  std::vector<kernels::Digest> digests;
};

// The twins of all chunks. They count in the host budget, and are released when that has no room for something else.
inline constexpr const char* kSpilledMemory = "spilled memory";

class HostTwins {
 public:
  explicit HostTwins(HostBudget& budget);
  class Entry;  // of one twin, which may be gone; the end of its life gives the twin back

  // Throws std::bad_alloc.
  std::shared_ptr<Entry> keep(HostTwin twin);
  // The twin is the caller's then, and counts as spilled memory. entry may be null.
  HostTwin take(const std::shared_ptr<Entry>& entry);
  // Gives back this much, or all there is: the oldest first. Returns how much it was.
  uint64_t give_way(uint64_t bytes) noexcept;
  // By twin, how much it holds.
  std::vector<uint64_t> sizes();

 private:
  HostHolder& twins_holder_;
  HostHolder& spilled_holder_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Entry>> entries_;
};

}  // namespace ebbtide
