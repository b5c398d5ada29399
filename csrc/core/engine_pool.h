#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/host_budget.h"
#include "core/pinned_budget.h"
#include "store/copy_engine.h"

namespace ebbtide {

// Lends copy engines and keeps them, since pinning their rings and making their streams costs more than a small copy. The rings are in the host budget.
class EnginePool {
 public:
  EnginePool(HostBudget& budget, PinnedBudget& pinned_budget) : budget_(budget), pinned_budget_(pinned_budget) {}

  struct Entry {
    HostClaim claim;
    PinnedClaim pinned;
    std::unique_ptr<CopyEngine> engine;
    std::unique_ptr<Staging> table;  // pinned memory for what kernels read and write; null until it is wanted
  };
  // Owns an engine for the length of a copy.
  class Loan {
   public:
    Loan(EnginePool& pool, Entry entry) : pool_(&pool), entry_(std::move(entry)) {}
    Loan(Loan&& other) noexcept : pool_(other.pool_), entry_(std::move(other.entry_)) {}
    Loan& operator=(Loan&&) = delete;
    ~Loan();
    CopyEngine& engine() { return *entry_.engine; }
    // So much pinned memory for tables that kernels read and write; the same memory each time, unspecified content. Throws StoreError, DriverError.
    std::byte* table(size_t size_bytes);

   private:
    EnginePool* pool_;
    Entry entry_;
  };

  // With thread_count lanes, or fewer where the system or the budget does not allow the ring; at least one. Throws StoreError, DriverError.
  Loan borrow(int device, int thread_count);
  // Gives the kept engines back to the system.
  void trim() noexcept;
  // Pinned memory of all rings.
  uint64_t held_bytes() const { return held_bytes_.load(); }

 private:
  Entry make(int device, int thread_count);
  Entry take_kept(int device, int thread_count);
  std::unique_ptr<Staging> pin_ring(int slot_count, int threads, Entry& entry);
  template <typename Make>
  std::unique_ptr<Staging> pin(uint64_t slot_bytes, int slot_count, const char* purpose, Entry& entry,
                               Make make_staging);
  void give_back(Entry entry) noexcept;
  void drop(Entry entry) noexcept;

  HostBudget& budget_;
  PinnedBudget& pinned_budget_;
  std::mutex mutex_;
  std::vector<Entry> kept_;
  std::vector<Entry> poisoned_;
  std::atomic<uint64_t> held_bytes_{0};
};

// The cores that this process may use: by affinity and by the cgroups' cpu quotas.
int usable_cores();

// The threads that a copy of so many bytes gets; EBBTIDE_COPY_THREADS overrides.
int choose_copy_threads(uint64_t bytes);

}  // namespace ebbtide
