#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "core/memory/allocation.h"

// The allocations that a pause took memory from, by their sequence numbers, which are never reused. Thread-safe. Its
// lock is the last in the lock order.
namespace ebbtide {

class PausedSet {
 public:
  // False if it was noted before.
  bool note(const Allocation& allocation, const std::string& tag) {
    const std::lock_guard lock(mutex_);
    return tags_.emplace(allocation.sequence, tag).second;
  }
  void forget(const Allocation& allocation) noexcept {
    const std::lock_guard lock(mutex_);
    tags_.erase(allocation.sequence);
  }
  bool contains(const Allocation& allocation) const {
    const std::lock_guard lock(mutex_);
    return tags_.contains(allocation.sequence);
  }
  std::set<std::string> tags() const {
    const std::lock_guard lock(mutex_);
    std::set<std::string> names;
    for (const auto& [sequence, name] : tags_) names.insert(name);
    return names;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, std::string> tags_;  // by sequence
};

}  // namespace ebbtide
