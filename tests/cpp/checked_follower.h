// A follower of training steps whose actions are checked, and steps that are run through it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "policy/lms/step_follower.h"
#include "step_replay.h"

namespace ebbtide::policy {

// Calls a follower, and checks that each action makes sense after the calls and actions before it.
class CheckedFollower {
 public:
  uint64_t saved(uint64_t size_bytes, uint64_t demand_bytes, double now) {
    const uint64_t storage = follower.saved(size_bytes, demand_bytes, now);
    EXPECT_TRUE(storages_.emplace(storage, Storage{}).second) << "numbers are unique";
    check();
    return storage;
  }
  void became_free(uint64_t storage) {
    follower.became_free(storage);
    if (storages_.contains(storage)) storages_[storage].is_free = !storages_[storage].is_gone;
    check();
  }
  void wanted(uint64_t storage, uint64_t demand_bytes, double now) {
    follower.wanted(storage, demand_bytes, now);
    check();
    if (!storages_.contains(storage) || storages_[storage].is_gone) return;
    if (storages_[storage].is_released) ++late_loads;
    storages_[storage] = {};
  }
  void dropped(uint64_t storage) {
    follower.dropped(storage);
    if (storages_.contains(storage)) storages_[storage] = {.is_gone = true};
    check();
  }
  void missed(uint64_t demand_bytes) {
    follower.missed(demand_bytes);
    check();
  }
  void end_step(const StepLimits& limits) {
    follower.end_step(limits);
    check();
    storages_.clear();
  }

  StepFollower follower;
  size_t late_loads = 0;  // released, and wanted before an action loaded it

 private:
  struct Storage {
    bool is_free = false, is_copied = false, is_released = false, is_gone = false;
  };

  void check() {
    for (const uint64_t storage : follower.actions().copies_out) {
      EXPECT_TRUE(storages_.at(storage).is_free);
      EXPECT_FALSE(std::exchange(storages_.at(storage).is_copied, true));
    }
    for (const uint64_t storage : follower.actions().releases) {
      EXPECT_TRUE(storages_.at(storage).is_free && storages_.at(storage).is_copied);
      EXPECT_FALSE(std::exchange(storages_.at(storage).is_released, true));
    }
    for (const uint64_t storage : follower.actions().loads) {
      EXPECT_TRUE(std::exchange(storages_.at(storage).is_released, false));
      const std::vector<uint64_t>& releases = follower.actions().releases;
      EXPECT_EQ(std::find(releases.begin(), releases.end(), storage), releases.end()) << "in vain";
      storages_.at(storage).is_copied = false;
    }
  }

  std::map<uint64_t, Storage> storages_;
};

// What happened at each event of a step, as a plan that can be replayed.
struct FollowedStep {
  StepPlan done;
  std::vector<int64_t> held;
  bool was_followed = false;
};

inline FollowedStep run_step(CheckedFollower& checked, const StepRecord& record, const StepLimits& limits,
                             double speed = 1) {
  FollowedStep run;
  std::map<uint64_t, uint32_t> indices;
  std::map<uint32_t, uint32_t> open;  // storage -> its departure
  std::vector<uint64_t> numbers(record.sizes_bytes.size());
  const auto event_count = static_cast<uint32_t>(record.events.size());
  for (uint32_t index = 0; index < event_count; ++index) {
    const StepEvent& event = record.events[index];
    const double now = event.seconds / speed;
    if (event.kind == StepEventKind::kSaved) {
      numbers[event.storage] = checked.saved(record.sizes_bytes[event.storage], event.demand_bytes, now);
      indices[numbers[event.storage]] = event.storage;
    }
    if (event.kind == StepEventKind::kFree) checked.became_free(numbers[event.storage]);
    if (event.kind == StepEventKind::kWanted) checked.wanted(numbers[event.storage], event.demand_bytes, now);
    if (event.kind == StepEventKind::kDropped) checked.dropped(numbers[event.storage]);
    const StepActions& actions = checked.follower.actions();
    for (const uint64_t number : actions.copies_out) {
      open[indices.at(number)] = static_cast<uint32_t>(run.done.departures.size());
      run.done.departures.push_back({indices.at(number), index, index, kNoEvent, kNoEvent, event_count});
    }
    for (const uint64_t number : actions.releases) run.done.departures[open.at(indices.at(number))].release_at = index;
    for (const uint64_t number : actions.loads) run.done.departures[open.at(indices.at(number))].load_at = index;
    if (event.kind != StepEventKind::kSaved && event.kind != StepEventKind::kFree && open.contains(event.storage)) {
      run.done.departures[open[event.storage]].end_at = index;
      open.erase(event.storage);
    }
    run.was_followed = checked.follower.is_following();
  }
  std::erase_if(run.done.departures, [](const Departure& departure) { return departure.release_at == kNoEvent; });
  std::sort(run.done.departures.begin(), run.done.departures.end(),
            [](const Departure& left, const Departure& right) { return left.end_at < right.end_at; });
  run.done.actions = actions_of(run.done.departures);
  run.held = held_bytes(record, run.done.departures);
  checked.end_step(limits);
  return run;
}

// A follower's knowledge of a step without misses: nothing is sampled when a storage becomes free or is dropped.
inline StepRecord as_recorded(StepRecord record) {
  std::vector<bool> is_free(record.sizes_bytes.size(), false);
  for (size_t index = 0; index < record.events.size(); ++index) {
    StepEvent& event = record.events[index];
    const bool was_free = is_free[event.storage];
    is_free[event.storage] = event.kind == StepEventKind::kFree;
    if (event.kind == StepEventKind::kSaved || event.kind == StepEventKind::kWanted) continue;
    event.seconds = record.events[index - 1].seconds;
    event.demand_bytes = record.events[index - 1].demand_bytes;
    if (event.kind != StepEventKind::kDropped || !was_free) continue;
    event.demand_bytes -= std::min(event.demand_bytes, record.sizes_bytes[event.storage]);
  }
  return record;
}

inline void expect_same_departures(const StepPlan& done, const StepPlan& planned) {
  const auto sorted = [](const StepPlan& plan) {
    std::vector<std::array<uint32_t, 4>> numbers;
    for (const Departure& departure : plan.departures)
      numbers.push_back({departure.storage, departure.copy_at, departure.release_at, departure.load_at});
    std::sort(numbers.begin(), numbers.end());
    return numbers;
  };
  EXPECT_EQ(sorted(done), sorted(planned));
}

inline uint64_t part_of_peak(const StepRecord& record, uint64_t percent) { return peak_bytes(record) / 100 * percent; }

inline int64_t most(const std::vector<int64_t>& held) { return *std::max_element(held.begin(), held.end()); }

inline StepRecord small_step(uint64_t first_bytes = 10, size_t layers = 8) {
  std::vector<Layer> all(layers, {10, 0.01, 0.02});
  all.front().saved_bytes = first_bytes;
  return layered_step(all, 5, 3);
}
inline constexpr StepLimits kSmallLimits{50, 1000, 1000};

}  // namespace ebbtide::policy
