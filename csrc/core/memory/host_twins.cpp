#include "core/memory/host_twins.h"

#include <utility>

namespace ebbtide {

class HostTwins::Place {
 public:
  HostTwin twin;
};

HostTwins::HostTwins(HostBudget& budget)
    : twins_holder_(budget.holder("host copies of promoted memory")), spilled_holder_(budget.holder(kSpilledMemory)) {}

std::shared_ptr<HostTwins::Place> HostTwins::keep(HostTwin twin) {
  twin.charge.hold_for(twins_holder_);
  auto place = std::make_shared<Place>();
  place->twin = std::move(twin);
  const std::lock_guard lock(mutex_);
  std::erase_if(places_, [](const std::weak_ptr<Place>& each) { return each.expired(); });
  places_.push_back(place);
  return place;
}

HostTwin HostTwins::take(const std::shared_ptr<Place>& place) {
  if (place == nullptr) return {};
  const std::lock_guard lock(mutex_);
  HostTwin twin = std::exchange(place->twin, {});
  twin.charge.hold_for(spilled_holder_);
  return twin;
}

uint64_t HostTwins::give_way(uint64_t bytes) noexcept {
  for (uint64_t given_bytes = 0;;) {
    // They go without the lock: giving memory back takes long.
    std::shared_ptr<Place> place;
    HostTwin gone;
    const std::lock_guard lock(mutex_);
    for (const std::weak_ptr<Place>& each : places_) {
      place = each.lock();
      if (place != nullptr && place->twin.memory.has_handle()) break;
    }
    if (given_bytes >= bytes || place == nullptr || !place->twin.memory.has_handle()) return given_bytes;
    given_bytes += place->twin.memory.size_bytes();
    gone = std::exchange(place->twin, {});
  }
}

std::vector<uint64_t> HostTwins::sizes() {
  std::vector<std::shared_ptr<Place>> places;  // outlives the lock: the end of one gives memory back
  std::vector<uint64_t> sizes;
  const std::lock_guard lock(mutex_);
  for (const std::weak_ptr<Place>& each : places_) {
    if (const auto place = each.lock()) places.push_back(place);
  }
  for (const auto& place : places) {
    if (place->twin.memory.has_handle()) sizes.push_back(place->twin.charge.size_bytes());
  }
  return sizes;
}

}  // namespace ebbtide
