#pragma once

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/registry/registry.h"

namespace ebbtide {

// The tag, policy and device of a slot's allocations, which torch does not pass to its entry points.
struct SlotBinding {
  Tag* tag = nullptr;
  Policy policy;
  int device = -1;
};

// A fixed table, bound from the front and never unbound, so that readers need no lock.
class SlotTable {
 public:
  static constexpr int kCapacity = 4096;
  explicit SlotTable(Registry& registry) : registry_(registry) {}
  // Throws StateError when all are taken.
  int bind(const std::string& tag, const Policy& policy, int device);
  // Null for a slot that was never bound.
  const SlotBinding* find(int slot) const;

 private:
  Registry& registry_;
  std::mutex mutex_;
  std::map<std::pair<const Tag*, int>, std::vector<int>> slots_of_;  // by tag and device
  std::array<SlotBinding, kCapacity> bindings_;
  std::atomic<int> count_{0};
};

}  // namespace ebbtide
