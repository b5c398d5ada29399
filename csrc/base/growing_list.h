#pragma once

#include <atomic>
#include <utility>

namespace ebbtide {

// A list that only grows, without a lock, so that a fork at any moment is harmless. Its values are never destroyed.
template <typename Value>
class GrowingList {
 public:
  // The newest value that is wanted, or null.
  template <typename Wanted>
  const Value* find(const Wanted& is_wanted) const noexcept {
    const Entry* entry = newest_.load(std::memory_order_acquire);
    while (entry != nullptr && !is_wanted(entry->value)) entry = entry->before;
    return entry == nullptr ? nullptr : &entry->value;
  }
  const Value& add(Value value) {
    auto* const entry = new Entry{std::move(value), newest_.load(std::memory_order_relaxed)};
    while (!newest_.compare_exchange_weak(entry->before, entry, std::memory_order_release)) continue;
    return entry->value;
  }

 private:
  struct Entry {
    Value value;
    const Entry* before;
  };
  std::atomic<const Entry*> newest_{nullptr};
};

}  // namespace ebbtide
