#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace ebbtide::preload {

// Records about the program's memory that the driver owns, by address or handle. A key is unique until the driver
// returns it again.
template <typename Held>
class MemoryMap {
 public:
  using Entries = std::map<uint64_t, Held>;
  // An entry made before the memory it describes, so that recording it needs no allocation and can't fail.
  using Entry = typename Entries::node_type;
  static Entry make_entry(Held held) {
    Entries single;
    single.emplace(0, std::move(held));
    return single.extract(single.begin());
  }

  void keep(uint64_t key, Entry entry) noexcept {
    entry.key() = key;
    Entry stale;  // its free was not seen; its content is destroyed outside the lock
    const std::lock_guard lock(mutex_);
    stale = entries_.extract(key);
    entries_.insert(std::move(entry));
  }
  // Removes the record before the driver frees, because another thread may receive the same address at once. Empty if
  // there is none.
  Entry take(uint64_t key) noexcept {
    const std::lock_guard lock(mutex_);
    return entries_.extract(key);
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
  size_t count() const noexcept {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  mutable std::mutex mutex_;
  Entries entries_;
};

}  // namespace ebbtide::preload
