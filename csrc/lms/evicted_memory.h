#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "core/budget/host_budget.h"
#include "store/anonymous_memory.h"

// Host memory for bytes that were evicted from a device. Each piece has exactly the pages that it needs: nothing is
// rounded to powers of two, and nothing is kept when it is given back.
namespace ebbtide::lms {

class EvictedMemory {
 public:
  explicit EvictedMemory(HostBudget& budget) : budget_(budget) {}

  // Its pages are there when this returns. Throws StoreError, and takes nothing, if the host has too little room.
  std::byte* take(size_t size_bytes);
  // Throws InvalidArgument for an address that take() did not return, or that was given back.
  void give_back(void* address);
  uint64_t held_bytes() const;

 private:
  struct Piece {
    AnonymousMemory memory;
    HostCharge charge;
  };

  HostBudget& budget_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, Piece> pieces_;
  uint64_t held_bytes_ = 0;
};

// The process's one. Leaked on purpose: graphs may be freed after static destructors have run.
EvictedMemory& evicted_memory();

}  // namespace ebbtide::lms
