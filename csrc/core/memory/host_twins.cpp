#include "core/memory/host_twins.h"

#include <utility>

namespace ebbtide {

class HostTwins::Entry {
 public:
  HostTwin twin;
};

HostTwins::HostTwins(HostBudget& budget)
    : twins_holder_(budget.holder("host copies of promoted memory")), spilled_holder_(budget.holder(kSpilledMemory)) {}

std::shared_ptr<HostTwins::Entry> HostTwins::keep(HostTwin twin) {
  twin.charge.hold_for(twins_holder_);
  auto entry = std::make_shared<Entry>();
  entry->twin = std::move(twin);
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [](const std::weak_ptr<Entry>& each) { return each.expired(); });
  entries_.push_back(entry);
  return entry;
}

HostTwin HostTwins::take(const std::shared_ptr<Entry>& entry) {
  if (entry == nullptr) return {};
  const std::lock_guard lock(mutex_);
  HostTwin twin = std::exchange(entry->twin, {});
  twin.charge.hold_for(spilled_holder_);
  return twin;
}

uint64_t HostTwins::give_way(uint64_t bytes) noexcept {
  for (uint64_t given_bytes = 0;;) {
    // They go without the lock: giving memory back takes long.
    std::shared_ptr<Entry> entry;
    HostTwin gone;
    const std::lock_guard lock(mutex_);
    for (const std::weak_ptr<Entry>& each : entries_) {
      entry = each.lock();
      if (entry != nullptr && entry->twin.memory.has_handle()) break;
    }
    if (given_bytes >= bytes || entry == nullptr || !entry->twin.memory.has_handle()) return given_bytes;
    given_bytes += entry->twin.memory.size_bytes();
    gone = std::exchange(entry->twin, {});
  }
}

std::vector<uint64_t> HostTwins::sizes() {
  std::vector<std::shared_ptr<Entry>> entries;  // outlives the lock: the end of one gives memory back
  std::vector<uint64_t> sizes;
  const std::lock_guard lock(mutex_);
  for (const std::weak_ptr<Entry>& each : entries_) {
    if (const auto entry = each.lock()) entries.push_back(entry);
  }
  for (const auto& entry : entries) {
    if (entry->twin.memory.has_handle()) sizes.push_back(entry->twin.charge.size_bytes());
  }
  return sizes;
}

}  // namespace ebbtide
