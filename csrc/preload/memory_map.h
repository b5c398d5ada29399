#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/budget/device_budget.h"
#include "core/budget/host_budget.h"

namespace ebbtide::preload {

// Records about the program's memory that the driver owns, by address or handle. A key is unique until the driver
// returns it again.
template <typename Held>
class MemoryMap {
 public:
  // How often the program has yet to give it back.
  struct Record {
    Held held;
    size_t references = 1;
  };
  using Entries = std::map<uint64_t, Record>;
  // An entry made before the memory it describes, so that recording it needs no allocation and can't fail.
  using Entry = typename Entries::node_type;
  static Entry make_entry(Held held) {
    Entries single;
    single.emplace(0, Record{std::move(held)});
    return single.extract(single.begin());
  }

  void keep(uint64_t key, Entry entry) noexcept {
    entry.key() = key;
    Entry stale;  // its free was not seen; its content is destroyed outside the lock
    const std::lock_guard lock(mutex_);
    stale = entries_.extract(key);
    entries_.insert(std::move(entry));
  }
  // The program holds it once more, if there is a record.
  void retain(uint64_t key) noexcept {
    const std::lock_guard lock(mutex_);
    if (const auto found = entries_.find(key); found != entries_.end()) ++found->second.references;
  }
  // Removes the record before the driver frees, because another thread may receive the same address at once. Empty if
  // there is none, or if the program holds it more than once: then that is once less.
  Entry take(uint64_t key) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found == entries_.end()) return {};
    if (found->second.references == 1) return entries_.extract(found);
    --found->second.references;
    return {};
  }
  // After a take: the driver did not free it.
  void put_back(uint64_t key, Entry entry) noexcept {
    if (entry.empty())
      retain(key);
    else
      keep(key, std::move(entry));
  }
  Entries take_all() noexcept {
    Entries taken;
    const std::lock_guard lock(mutex_);
    taken.swap(entries_);
    return taken;
  }
  bool has(uint64_t key) const noexcept {
    const std::lock_guard lock(mutex_);
    return entries_.contains(key);
  }
  std::optional<Held> find(uint64_t key) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    return found != entries_.end() ? std::optional(found->second.held) : std::nullopt;
  }
  size_t count() const noexcept {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  mutable std::mutex mutex_;
  Entries entries_;
};

// Memory that the driver owns and that still counts. EBBTIDE_DEVICE_LIMIT covers all memory that the program takes, so
// every free must know how much was taken.
using CountedMemory = MemoryMap<DeviceCharge>;

// Memory of EBBTIDE_OVERFLOW=managed.
struct ManagedBlock {
  int device = -1;
  HostCharge charge;
  std::array<CUcontext, 2> other_contexts{};  // as an allocation of the core has them
};

struct Records {
  CountedMemory addresses, handles;
  MemoryMap<HostCharge> host_handles;  // the charges of handles on the host, given back at their release
  MemoryMap<size_t> asked_sizes;       // of the core's allocations, whose sizes are rounded up
  MemoryMap<ManagedBlock> managed;
  MemoryMap<ManagedBlock> put_off;  // managed memory that the program has freed, but the driver has not yet
};
// Leaked on purpose: frees come after static destructors.
inline Records& records() {
  static auto* const instance = new Records;
  return *instance;
}

}  // namespace ebbtide::preload
