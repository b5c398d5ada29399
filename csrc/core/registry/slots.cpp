#include "core/registry/slots.h"

#include "base/error.h"

namespace ebbtide {

int SlotTable::bind(const std::string& tag, const Policy& policy, int device) {
  Tag& owner = registry_.tag(tag);
  const std::lock_guard lock(mutex_);
  const int count = count_.load();
  std::vector<int>& bound = slots_of_[{&owner, device}];
  for (const int slot : bound) {
    if (bindings_[static_cast<size_t>(slot)].policy == policy) return slot;
  }
  if (count == kCapacity) {
    throw StateError(
        "all " + std::to_string(kCapacity) +
        " combinations of tag, policy and device are taken: use fewer tags (a tag may hold any number of tensors)");
  }
  bound.push_back(count);
  bindings_[static_cast<size_t>(count)] = {&owner, policy, device};
  count_.store(count + 1, std::memory_order_release);
  return count;
}

const SlotBinding* SlotTable::find(int slot) const {
  if (slot < 0 || slot >= count_.load(std::memory_order_acquire)) return nullptr;
  return &bindings_[static_cast<size_t>(slot)];
}

}  // namespace ebbtide
