#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/budget/host_budget.h"
#include "core/budget/pinned_budget.h"
#include "policy/copy_plan.h"
#include "store/copy_engine.h"
#include "store/copy_queue.h"

namespace ebbtide {

// The parts of an engine beside the ring of the copy that it is borrowed for.
struct EngineExtras {
  uint64_t table_bytes = 0;       // that table() will be asked for: a ring would take all the room that is left
  uint64_t later_ring_bytes = 0;  // a ring that a later copy will want, and that is made now
};

// Lends copy engines and keeps them, since pinning a ring and creating streams costs more than a small copy. The rings
// are charged to the host budget.
class EnginePool {
 public:
  EnginePool(HostBudget& budget, PinnedBudget& pinned_budget);

  // Pinned memory with its charges, which outlive it.
  struct PinnedBlock {
    HostCharge charge;
    PinnedCharge pinned;
    std::unique_ptr<HostMemory> memory;
  };
  struct Entry {
    PinnedBlock ring;  // whose memory the engine has
    std::unique_ptr<CopyEngine> engine;
    PinnedBlock table;  // read and written by kernels; without memory until it is wanted
    uint64_t ring_bytes() const { return engine->staging().size_bytes(); }
  };
  // Owns an engine for the length of a copy.
  class Loan {
   public:
    Loan(EnginePool& pool, Entry entry, const RingCut& cut) : pool_(&pool), entry_(std::move(entry)), cut_(cut) {}
    Loan(Loan&& other) noexcept : pool_(other.pool_), entry_(std::move(other.entry_)), cut_(other.cut_) {}
    Loan& operator=(Loan&&) = delete;
    ~Loan();
    CopyEngine& engine() { return *entry_.engine; }
    // How the copy that it was borrowed for uses the ring.
    const RingCut& cut() const { return cut_; }
    // Pinned memory of this size for tables that kernels read and write. The same memory each time, with unspecified
    // content. Throws StoreError, DriverError.
    std::byte* table(size_t size_bytes);
    // The same, or null where there is no room for it.
    std::byte* try_table(size_t size_bytes);

   private:
    EnginePool* pool_;
    Entry entry_;
    RingCut cut_;
  };

  // With the ring that the copy wants, or a smaller one where the system or the budget does not allow it, down to the
  // minimum of the policy. The table yields to that minimum. Throws StoreError, DriverError.
  Loan borrow(int device, const policy::CopyNeed& need, const EngineExtras& extras = {});
  // Gives the kept engines back to the system; false: there are none.
  bool trim() noexcept;
  // Pinned memory of all rings and tables.
  uint64_t held_bytes() const { return holder_.bytes.load(); }

 private:
  Entry make(int device, const policy::CopyNeed& need, uint64_t ring_bytes, uint64_t table_bytes);
  Entry take_kept(int device, uint64_t ring_bytes);
  Entry take_or_make(int device, const policy::CopyNeed& need, uint64_t ring_bytes, uint64_t table_bytes);
  PinnedBlock pin_table(uint64_t size_bytes);
  PinnedBlock pin_ring(uint64_t wanted_bytes, int threads);
  template <typename Make>
  PinnedBlock pin(uint64_t size_bytes, const char* purpose, Make make);
  bool try_keep(Entry& entry) noexcept;
  void give_back(Entry entry) noexcept;
  void drop(Entry entry) noexcept;

  HostBudget& budget_;
  HostHolder& holder_;
  PinnedBudget& pinned_budget_;
  std::mutex mutex_;
  std::vector<Entry> kept_;
  std::vector<Entry> poisoned_;
  size_t made_ = 0;  // and not dropped: kept_ and poisoned_ have room for all of them
};

// The cores that this process may use: by affinity and by the cgroups' cpu quotas.
int usable_cores();

// The needs of a copy that has the cores to itself: this many staged bytes to the store, of which fresh_bytes go into
// untouched memory. EBBTIDE_COPY_THREADS overrides the number of cores.
policy::CopyNeed copy_need(uint64_t bytes, uint64_t fresh_bytes);
// For taking fresh memory without a copy.
int populate_threads(uint64_t bytes);

}  // namespace ebbtide
