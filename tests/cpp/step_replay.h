// Training steps as records, other planners, and the cost of a plan beside the least one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "policy/lms/step_choice.h"
#include "policy/lms/step_plan.h"
#include "policy/lms/step_record.h"

namespace ebbtide::policy {

inline constexpr double kLinkRate = 55e9;

inline StepLimits at_limit(uint64_t limit_bytes) { return {limit_bytes, kLinkRate, kLinkRate}; }

inline uint64_t peak_bytes(const StepRecord& record) {
  uint64_t peak = 0;
  for (const StepEvent& event : record.events) peak = std::max(peak, event.demand_bytes);
  return peak;
}

// --- Traces ---

// Writes down a step: its clock, and the demand of saved tensors and of temporaries.
class StepWriter {
 public:
  explicit StepWriter(uint64_t base_bytes) : held_bytes_(base_bytes) {}

  uint32_t save(uint64_t size_bytes, uint64_t temporary_bytes = 0) {
    const auto storage = static_cast<uint32_t>(record_.storages.size());
    record_.storages.push_back({.size_bytes = size_bytes, .key = storage + uint64_t{1}});
    held_bytes_ += size_bytes;
    add(StepEventKind::kSaved, storage, temporary_bytes);
    return storage;
  }
  void set_free(uint32_t storage) { add(StepEventKind::kFree, storage, 0); }
  void want(uint32_t storage, uint64_t temporary_bytes = 0) { add(StepEventKind::kWanted, storage, temporary_bytes); }
  void drop(uint32_t storage) {
    held_bytes_ -= record_.storages[storage].size_bytes;
    add(StepEventKind::kDropped, storage, 0);
  }
  void pass(double seconds) { now_ += seconds; }
  const StepRecord& record() const { return record_; }

 private:
  void add(StepEventKind kind, uint32_t storage, uint64_t temporary_bytes) {
    record_.events.push_back({kind, storage, held_bytes_ + temporary_bytes, now_});
  }

  uint64_t held_bytes_;
  double now_ = 0;
  StepRecord record_;
};

struct Layer {
  uint64_t saved_bytes = 0;
  double forward_seconds = 0;
  double backward_seconds = 0;
};

// One storage a layer. The next layer still refers to it while it computes. temporary_bytes: of each backward layer.
inline StepRecord layered_step(const std::vector<Layer>& layers, uint64_t base_bytes, uint64_t temporary_bytes) {
  StepWriter step(base_bytes);
  for (uint32_t layer = 0; layer < layers.size(); ++layer) {
    step.pass(layers[layer].forward_seconds);
    step.save(layers[layer].saved_bytes);
    if (layer > 0) step.set_free(layer - 1);
  }
  step.set_free(static_cast<uint32_t>(layers.size() - 1));
  for (auto layer = static_cast<uint32_t>(layers.size()); layer-- > 0;) {
    step.want(layer, temporary_bytes);
    step.pass(layers[layer].backward_seconds);
    step.drop(layer);
  }
  return step.record();
}

// 8 blocks of 12 storages of 0.25 to 1 GB, 46 GB in all; forward 200 ms, backward 400 ms.
inline StepRecord llama_step() {
  const std::vector<uint64_t> block_mb = {250, 500, 500, 250, 250, 500, 500, 500, 1000, 750, 500, 250};
  std::vector<Layer> layers;
  for (int block = 0; block < 8; ++block)
    for (const uint64_t mb : block_mb) layers.push_back({mb * 1'000'000, 0.2 / 96, 0.4 / 96});
  return layered_step(layers, 1'000'000'000, 500'000'000);
}

// 500 storages of 800 MB down to 2 MB, 67 GB in all. Large layers take longer; forward 500 ms, backward 1 s.
inline StepRecord resnet_step() {
  std::vector<Layer> layers(500);
  double all_bytes = 0;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const double bytes = 800e6 * std::pow(400.0, -static_cast<double>(layer) / 499);
    layers[layer].saved_bytes = static_cast<uint64_t>(bytes);
    all_bytes += bytes;
  }
  for (Layer& layer : layers) {
    layer.forward_seconds = 0.25 / 500 + 0.25 * static_cast<double>(layer.saved_bytes) / all_bytes;
    layer.backward_seconds = 2 * layer.forward_seconds;
  }
  return layered_step(layers, 1'000'000'000, 500'000'000);
}

// Anything that can happen: several uses, storages that are never free, never wanted, or outlive the step.
// From event `branch` on, it is another one for each seed.
inline StepRecord random_step(std::mt19937_64& random, size_t event_count, size_t branch = SIZE_MAX,
                              uint64_t seed = 0) {
  enum class State { kHeld, kFree };
  StepWriter step(random() % 100);
  std::vector<std::pair<uint32_t, State>> living;
  for (size_t count = 0; count < event_count; ++count) {
    if (count == branch) random.seed(seed);
    step.pass(static_cast<double>(random() % 100) * 1e-3);
    const uint64_t temporary_bytes = random() % 8 == 0 ? random() % 200 : 0;
    const size_t pick = living.empty() ? 0 : random() % living.size();
    // More births in the first half, more deaths in the second.
    const bool is_growing = random() % 4 < (count < event_count / 2 ? 3u : 1u);
    if (living.empty() || (is_growing && random() % 2 == 0)) {
      living.emplace_back(step.save(random() % 5 == 0 ? random() % 200 : random() % 20, temporary_bytes), State::kHeld);
    } else if (living[pick].second == State::kHeld && random() % 4 != 0) {
      step.set_free(living[pick].first);
      living[pick].second = State::kFree;
    } else if (!is_growing && random() % 2 == 0) {
      step.drop(living[pick].first);
      living.erase(living.begin() + static_cast<std::ptrdiff_t>(pick));
    } else {
      step.want(living[pick].first, temporary_bytes);
      living[pick].second = State::kHeld;
    }
  }
  return step.record();
}

// --- Other planners ---

// For each event the free storages, found anew: slow, and independent of how the planner keeps them.
struct FreeStorage {
  uint32_t storage;
  uint32_t free_at;
  uint32_t end_at;
  bool is_wanted;
};

inline std::vector<FreeStorage> absences(const StepRecord& record) {
  std::vector<FreeStorage> found;
  const auto event_count = static_cast<uint32_t>(record.events.size());
  for (uint32_t begin = 0; begin < event_count; ++begin) {
    if (record.events[begin].kind != StepEventKind::kFree) continue;
    const uint32_t storage = record.events[begin].index;
    if (storage == kNone) continue;
    uint32_t end = begin + 1;
    while (end < event_count && (is_of_call(record.events[end].kind) || record.events[end].index != storage)) ++end;
    found.push_back({storage, begin, end, end < event_count && record.events[end].kind == StepEventKind::kWanted});
  }
  return found;
}

// Bytes that leave if they leave when memory is short and come back when they are wanted: Belady's choice if is_belady,
// else what became free first. The absences that it chose are appended to `chosen` with their releases.
inline uint64_t on_demand_bytes(const StepRecord& record, uint64_t limit_bytes, bool is_belady,
                                std::vector<Departure>* chosen = nullptr) {
  const std::vector<FreeStorage> all = absences(record);
  std::vector<bool> is_away(all.size(), false);
  uint64_t moved_bytes = 0;
  for (uint32_t event = 0; event < record.events.size(); ++event) {
    uint64_t away_bytes = 0;
    for (size_t index = 0; index < all.size(); ++index)
      if (is_away[index] && all[index].end_at > event) away_bytes += record.storages[all[index].storage].size_bytes;
    while (record.events[event].demand_bytes > limit_bytes + away_bytes) {
      size_t best = all.size();
      const auto next_use = [&](size_t index) { return all[index].is_wanted ? all[index].end_at : kNoEvent; };
      for (size_t index = 0; index < all.size(); ++index) {
        if (is_away[index] || all[index].free_at > event || all[index].end_at <= event) continue;
        if (record.storages[all[index].storage].size_bytes == 0) continue;
        if (best == all.size() || (is_belady && next_use(index) > next_use(best))) best = index;
      }
      if (best == all.size()) break;
      is_away[best] = true;
      away_bytes += record.storages[all[best].storage].size_bytes;
      moved_bytes += record.storages[all[best].storage].size_bytes;
      if (chosen != nullptr)
        chosen->push_back({all[best].storage, all[best].free_at, all[best].free_at, event,
                           all[best].is_wanted ? all[best].end_at : kNoEvent, all[best].end_at});
    }
  }
  return moved_bytes;
}

// The bytes on the device at each event under a plan.
inline std::vector<int64_t> held_bytes(const StepRecord& record, const std::vector<Departure>& departures) {
  std::vector<int64_t> held;
  for (const StepEvent& event : record.events) held.push_back(static_cast<int64_t>(event.demand_bytes));
  for (const Departure& departure : departures)
    for (uint32_t event = departure.release_at; event < std::min(departure.load_at, departure.end_at); ++event)
      held[event] -= static_cast<int64_t>(record.storages[departure.storage].size_bytes);
  return held;
}

inline std::vector<StepAction> actions_of(const std::vector<Departure>& departures) {
  std::vector<StepAction> actions;
  for (uint32_t index = 0; index < departures.size(); ++index) {
    actions.push_back({departures[index].copy_at, StepActionKind::kCopyOut, index});
    actions.push_back({departures[index].release_at, StepActionKind::kRelease, index});
    if (departures[index].load_at != kNoEvent)
      actions.push_back({departures[index].load_at, StepActionKind::kLoad, index});
  }
  std::stable_sort(actions.begin(), actions.end(), [](const StepAction& left, const StepAction& right) {
    return std::pair(left.event, left.kind) < std::pair(right.event, right.kind);
  });
  return actions;
}

// First come, first offloaded: what became free first leaves, and its copy begins at once. Loads are in the order of
// use, look_ahead_bytes ahead of the last use, where memory allows.
inline StepPlan first_come_plan(const StepRecord& record, uint64_t limit_bytes, uint64_t look_ahead_bytes) {
  StepPlan plan;
  std::vector<Departure>& departures = plan.departures;
  on_demand_bytes(record, limit_bytes, false, &departures);
  std::sort(departures.begin(), departures.end(),
            [](const Departure& left, const Departure& right) { return left.end_at < right.end_at; });
  std::vector<int64_t> held = held_bytes(record, departures);
  uint32_t earlier_load = 0;
  for (size_t index = 0; index < departures.size(); ++index) {
    Departure& departure = departures[index];
    if (departure.load_at == kNoEvent) continue;
    // It may begin once all but look_ahead_bytes of the loads before it were used.
    const auto size_bytes = static_cast<int64_t>(record.storages[departure.storage].size_bytes);
    uint64_t ahead_bytes = static_cast<uint64_t>(size_bytes);
    uint32_t soonest = std::max(departure.release_at + 1, earlier_load);
    for (size_t before = index; before-- > 0;) {
      if (departures[before].load_at == kNoEvent) continue;
      ahead_bytes += record.storages[departures[before].storage].size_bytes;
      if (ahead_bytes <= look_ahead_bytes) continue;
      soonest = std::max(soonest, departures[before].end_at);
      break;
    }
    while (departure.load_at > soonest && held[departure.load_at - 1] + size_bytes <= static_cast<int64_t>(limit_bytes))
      held[--departure.load_at] += size_bytes;
    earlier_load = departure.load_at;
  }
  plan.actions = actions_of(departures);
  return plan;
}

// --- Replay ---

struct ReplayRates {
  double out_bytes_per_second = kLinkRate;
  double in_bytes_per_second = kLinkRate;
  double compute_speed = 1;  // durations are divided by it
};

struct ReplayResult {
  double seconds = 0;  // of the step, stalls included
  uint64_t out_bytes = 0;
  uint64_t in_bytes = 0;
};

inline ReplayResult replay(StepRecord record, const StepPlan& plan, const ReplayRates& rates = {}) {
  for (StepEvent& event : record.events) event.seconds /= rates.compute_speed;
  ReplayResult result;
  result.seconds = forecast_seconds(record, plan, {0, rates.out_bytes_per_second, rates.in_bytes_per_second});
  for (const Departure& departure : plan.departures) {
    const uint64_t size_bytes = record.storages[departure.storage].size_bytes;
    result.out_bytes += size_bytes;
    if (departure.load_at != kNoEvent) result.in_bytes += size_bytes;
  }
  return result;
}

// When forward ends: where the demand is highest.
inline double turning_seconds(const StepRecord& record) {
  const auto highest = std::max_element(
      record.events.begin(), record.events.end(),
      [](const StepEvent& left, const StepEvent& right) { return left.demand_bytes < right.demand_bytes; });
  return highest->seconds;
}

// The step's time if copies overlapped with computation wherever they can: in forward those out, in backward those in.
inline double ideal_seconds(const StepRecord& record, const ReplayResult& moved) {
  const double forward = turning_seconds(record);
  return std::max(forward, static_cast<double>(moved.out_bytes) / kLinkRate) +
         std::max(record.events.back().seconds - forward, static_cast<double>(moved.in_bytes) / kLinkRate);
}

// No plan is faster for a step that wants in backward all that it saved: at each event of forward, what exceeds the
// limit has gone over the link since the step began; and at each event of backward, it must still come back.
inline double least_seconds(const StepRecord& record, uint64_t limit_bytes) {
  const double turning = turning_seconds(record), end = record.events.back().seconds;
  double forward = turning, backward = end - turning;
  for (const StepEvent& event : record.events) {
    if (event.demand_bytes <= limit_bytes) continue;
    const double copy_seconds = static_cast<double>(event.demand_bytes - limit_bytes) / kLinkRate;
    if (event.seconds <= turning) forward = std::max(forward, copy_seconds + turning - event.seconds);
    if (event.seconds >= turning) backward = std::max(backward, event.seconds - turning + copy_seconds);
  }
  return forward + backward;
}

}  // namespace ebbtide::policy
