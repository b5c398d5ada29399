#include "preload/counted_memory.h"

#include <utility>

namespace ebbtide::preload {

CountedMemory::Entry CountedMemory::make_entry(Charges charges) {
  std::map<uint64_t, Charges> single;
  single.emplace(0, std::move(charges));
  return single.extract(single.begin());
}

void CountedMemory::keep(uint64_t key, Entry entry) noexcept {
  entry.key() = key;
  Entry stale;  // freed in a way that nobody told us of; its charges go outside the lock
  const std::lock_guard lock(mutex_);
  stale = entries_.extract(key);
  entries_.insert(std::move(entry));
}

CountedMemory::Entry CountedMemory::take(uint64_t key) noexcept {
  const std::lock_guard lock(mutex_);
  return entries_.extract(key);
}

size_t CountedMemory::count() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

CountedMemory& counted_addresses() {
  static auto* const instance = new CountedMemory;
  return *instance;
}

CountedMemory& counted_handles() {
  static auto* const instance = new CountedMemory;
  return *instance;
}

}  // namespace ebbtide::preload
