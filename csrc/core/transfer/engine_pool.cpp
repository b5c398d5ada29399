#include "core/transfer/engine_pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/settings.h"
#include "core/budget/host_reader.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

constexpr int kKeptPerDevice = 2;           // a swap uses two
constexpr uint64_t kTableUnit = 64 * kKiB;  // so that a table seldom grows
constexpr char kRing[] = "the pinned ring between device and host";

// The quota of this process's cgroups. Their files are read once a second at most: that takes 0.05 ms, and a small
// pause 0.5.
std::optional<double> recent_cpu_quota() {
  static constinit std::mutex mutex;
  static std::optional<double> quota;
  static std::optional<std::chrono::steady_clock::time_point> read_at;
  const std::lock_guard lock(mutex);
  const auto now = std::chrono::steady_clock::now();
  if (!read_at || now - *read_at > std::chrono::seconds(1)) {
    quota = read_cpu_quota("");
    read_at = now;
  }
  return quota;
}

// Whether the budgets and the system allowed it.
template <typename Pin>
bool has_room(Pin pin) {
  try {
    pin();
    return true;
  } catch (const StoreError&) {
    return false;
  } catch (const DriverError& error) {
    if (error.code != CUDA_ERROR_OUT_OF_MEMORY || error.call != "cuMemHostAlloc") throw;
    return false;
  }
}

}  // namespace

EnginePool::EnginePool(HostBudget& budget, PinnedBudget& pinned_budget)
    : budget_(budget), holder_(budget.holder(kRing)), pinned_budget_(pinned_budget) {}

EnginePool::Loan::~Loan() {
  if (entry_.engine != nullptr) pool_->give_back(std::move(entry_));
}

std::byte* EnginePool::Loan::table(size_t size_bytes) {
  const HostMemory* const table = entry_.table.memory.get();
  if (table == nullptr || table->size_bytes() < size_bytes) {
    const ContextScope scope(entry_.engine->device());
    PinnedBlock larger = pool_->pin_table(size_bytes);
    std::swap(entry_.table, larger);
  }
  return entry_.table.memory->bytes();
}

std::byte* EnginePool::Loan::try_table(size_t size_bytes) {
  return has_room([&] { table(size_bytes); }) ? entry_.table.memory->bytes() : nullptr;
}

template <typename Make>
EnginePool::PinnedBlock EnginePool::pin(uint64_t size_bytes, const char* purpose, Make make) {
  PinnedBlock block;
  block.pinned = pinned_budget_.charge(size_bytes, purpose);
  block.charge = budget_.charge_outside_cgroups(size_bytes, purpose);
  block.charge.hold_for(holder_);
  block.memory = make(size_bytes);
  return block;
}

EnginePool::PinnedBlock EnginePool::pin_table(uint64_t size_bytes) {
  return pin(round_up(size_bytes, kTableUnit), "tables for the GPU", HostMemory::allocate);
}

// As large as the budgets and the system allow.
EnginePool::PinnedBlock EnginePool::pin_ring(uint64_t wanted_bytes, int threads) {
  const auto make_ring = [&](uint64_t size_bytes) { return HostMemory::pin(size_bytes, threads); };
  for (uint64_t size_bytes = wanted_bytes;; size_bytes = round_up(size_bytes / 2, policy::kLeastRingBytes)) {
    const bool is_last_try = size_bytes <= policy::kLeastRingBytes;
    try {
      return pin(size_bytes, kRing, make_ring);
    } catch (const StoreError&) {
      if (is_last_try) throw;
    } catch (const DriverError& error) {
      const bool is_pinning = error.call == "cuMemHostAlloc" || error.call == "cuMemHostRegister";
      if (error.code != CUDA_ERROR_OUT_OF_MEMORY || !is_pinning) throw;
      if (is_last_try)
        throw StoreError(std::string("the system pins no memory for the ring between device and host: ") + error.what(),
                         {policy::kLeastRingBytes, 0, kUnlimited}, Cause::kPinning);
    }
  }
}

EnginePool::Entry EnginePool::make(int device, const policy::CopyNeed& need, uint64_t ring_bytes,
                                   uint64_t table_bytes) {
  const ContextScope scope(device);
  const int threads = policy::plan_copy(need, ring_bytes).threads;
  Entry entry;
  // Before the ring, which takes all that it gets. Where that leaves too little for the least ring, there is no table.
  if (table_bytes > 0) has_room([&] { entry.table = pin_table(table_bytes); });
  try {
    entry.ring = pin_ring(ring_bytes, threads);
  } catch (const StoreError&) {
    if (entry.table.memory == nullptr) throw;
    (void)std::exchange(entry.table, {});  // its memory goes before its charges
    entry.ring = pin_ring(ring_bytes, threads);
  }
  entry.engine = std::make_unique<CopyEngine>(device, std::move(entry.ring.memory));
  const std::lock_guard lock(mutex_);
  // For the way back, which must not need memory.
  kept_.reserve(made_ + 1);
  poisoned_.reserve(made_ + 1);
  ++made_;
  return entry;
}

// One with a ring of this size, if there is one; else whichever there is; else nothing.
EnginePool::Entry EnginePool::take_kept(int device, uint64_t ring_bytes) {
  const std::lock_guard lock(mutex_);
  auto found = kept_.end();
  for (auto entry = kept_.begin(); entry != kept_.end(); ++entry) {
    if (entry->engine->device() != device) continue;
    if (found == kept_.end()) found = entry;
    if (entry->ring_bytes() < ring_bytes) continue;
    found = entry;
    break;
  }
  if (found == kept_.end()) return {};
  Entry entry = std::move(*found);
  kept_.erase(found);
  return entry;
}

// A kept ring that is too small goes only when the larger one is there: memory that could be pinned once may not be had
// again, and a resume works through the smaller one as well.
EnginePool::Entry EnginePool::take_or_make(int device, const policy::CopyNeed& need, uint64_t ring_bytes,
                                           uint64_t table_bytes) {
  Entry kept = take_kept(device, ring_bytes);
  if (kept.engine == nullptr) {
    try {
      return make(device, need, ring_bytes, table_bytes);
    } catch (const StoreError&) {
      if (!trim()) throw;  // those of other devices
    }
    return make(device, need, ring_bytes, table_bytes);
  }
  if (kept.ring_bytes() >= ring_bytes) return kept;
  Entry made;
  try {
    made = make(device, need, ring_bytes, table_bytes);
  } catch (const StoreError&) {
    return kept;
  } catch (...) {
    give_back(std::move(kept));
    throw;
  }
  if (made.ring_bytes() <= kept.ring_bytes()) std::swap(made, kept);
  drop(std::move(kept));
  return made;
}

EnginePool::Loan EnginePool::borrow(int device, const policy::CopyNeed& need, const EngineExtras& extras) {
  const uint64_t ring_bytes = std::max(policy::wanted_ring_bytes(need), extras.later_ring_bytes);
  Entry entry = take_or_make(device, need, ring_bytes, extras.table_bytes);
  const policy::CopyPlan plan = policy::plan_copy(need, entry.ring_bytes());
  return {*this,
          std::move(entry),
          {plan.threads, plan.ring_bytes, plan.piece_bytes, policy::kPartBytes, policy::kRequestBytes}};
}

// Unpins, which takes long: never under the mutex.
void EnginePool::drop(Entry /*entry*/) noexcept {
  const std::lock_guard lock(mutex_);
  --made_;
}

bool EnginePool::try_keep(Entry& entry) noexcept {
  const std::lock_guard lock(mutex_);
  if (entry.engine->is_poisoned()) {
    // Never lent nor given back, and still in the books: its memory is there.
    poisoned_.push_back(std::move(entry));
    return true;
  }
  const auto kept_of_device = std::count_if(
      kept_.begin(), kept_.end(), [&](const Entry& kept) { return kept.engine->device() == entry.engine->device(); });
  if (kept_of_device >= kKeptPerDevice) return false;
  kept_.push_back(std::move(entry));
  return true;
}

void EnginePool::give_back(Entry entry) noexcept {
  if (!try_keep(entry)) drop(std::move(entry));
}

bool EnginePool::trim() noexcept {
  for (bool has_any = false;; has_any = true) {
    Entry entry;
    {
      const std::lock_guard lock(mutex_);
      if (kept_.empty()) return has_any;
      entry = std::move(kept_.back());
      kept_.pop_back();
    }
    drop(std::move(entry));
  }
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // hardware_concurrency() may read a file of sysfs, each time.
  int cores = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                            : static_cast<int>(std::thread::hardware_concurrency());
  if (const auto quota = recent_cpu_quota()) cores = std::min(cores, std::max(1, static_cast<int>(*quota)));
  return std::max(1, cores);
}

policy::CopyNeed copy_need(uint64_t bytes, uint64_t fresh_bytes) {
  const auto wanted = static_cast<int>(read_number(Setting::kCopyThreads).value_or(0));
  return {.bytes = bytes, .fresh_bytes = fresh_bytes, .cores = usable_cores(), .wanted_threads = wanted};
}

int populate_threads(uint64_t bytes) { return policy::plan_copy(copy_need(bytes, bytes), kUnlimited).threads; }

}  // namespace ebbtide
