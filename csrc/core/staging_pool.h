#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/host_budget.h"
#include "store/copier.h"

namespace ebbtide {

// Lends pinned rings to copies and keeps the last one, since pinning costs more than a small copy. Its bytes are in the host budget.
class StagingPool {
 public:
  explicit StagingPool(HostBudget& budget) : budget_(budget) {}

  struct Ring {
    HostClaim claim;
    std::unique_ptr<Staging> staging;
  };
  // Owns a ring for the length of a copy.
  class Loan {
   public:
    Loan(StagingPool& pool, Ring ring) : pool_(&pool), ring_(std::move(ring)) {}
    Loan(Loan&& other) noexcept : pool_(other.pool_), ring_(std::move(other.ring_)) {}
    Loan& operator=(Loan&&) = delete;
    ~Loan();
    Staging& staging() { return *ring_.staging; }

   private:
    StagingPool* pool_;
    Ring ring_;
  };

  // With thread_count times kSlotsPerThread slots, or fewer where the system or the budget does not allow that; at least one. Throws StoreError.
  Loan borrow(int device, int thread_count);
  // Gives the kept ring back to the system.
  void trim() noexcept;
  uint64_t held_bytes() const { return held_bytes_.load(); }

 private:
  Ring make(int device, int slot_count);
  void give_back(Ring ring) noexcept;
  HostBudget& budget_;
  std::mutex mutex_;
  Ring kept_;
  std::vector<Ring> poisoned_;
  std::atomic<uint64_t> held_bytes_{0};
};

// The cores that this process may use, by affinity.
int usable_cores();

// The threads that a copy of so many bytes gets; EBBTIDE_COPY_THREADS overrides.
int choose_copy_threads(uint64_t bytes);

}  // namespace ebbtide
