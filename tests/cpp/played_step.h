// Steps that are run through a follower, as the torch extension would: plans are carried out, what is recomputed saves
// nothing inside, and where memory is short something leaves on demand.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "checked_follower.h"
#include "policy/lms/step_choice.h"
#include "step_replay.h"

namespace ebbtide::policy {

struct PlayedStep {
  StepRecord happened;  // with the demands, and with the times of recomputing
  StepPlan done;        // what has left, as a plan for that
  std::vector<int64_t> held;
  bool was_followed = false;
  size_t recomputed = 0;
  uint64_t moved_bytes = 0;    // out, by plan and on demand
  uint64_t missing_bytes = 0;  // the most that was over the limit, before something left on demand
};

// How a step is played.
struct Manner {
  double speed = 1;                   // of the device
  bool evicts_on_demand = true;       // what became free first leaves
  double measured_seconds = 0;        // if not 0: what the step's clock shows in the end
  uint64_t believed_limit_bytes = 0;  // if not 0: the limit of plans, if it is not the one that holds
};

class StepPlayer {
 public:
  StepPlayer(CheckedFollower& checked, const StepRecord& record, const StepRules& rules, const Manner& manner)
      : checked_(checked),
        record_(record),
        rules_(rules),
        manner_(manner),
        storages_(record.storages.size()),
        blocks_(record.calls.size()),
        calls_(record.calls.size(), kNone) {
    played_.happened = record;
  }

  PlayedStep play() {
    const auto count = static_cast<uint32_t>(record_.events.size());
    for (event_ = 0; event_ < count; ++event_) {
      StepEvent& event = played_.happened.events[event_];
      step(event);
      played_.was_followed = checked_.follower.is_following();
      if (manner_.evicts_on_demand) evict_on_demand();
      played_.held.push_back(static_cast<int64_t>(demand()) - static_cast<int64_t>(away_bytes_));
    }
    finish();
    return std::move(played_);
  }

 private:
  struct Storage {
    uint64_t number = UINT64_MAX;
    uint32_t departure = kNone;  // while it is copied or away
    uint32_t free_at = kNone;
    bool is_away = false;
  };
  struct BlockState {
    bool is_recomputed = false, has_returned = false, has_run_again = false;
    uint64_t saved_bytes = 0;  // inside, and not given up
  };

  // The recomputed block that makes the storage, or kNone. Its own arguments stay.
  uint32_t block_of(uint32_t storage) const {
    const RecordedStorage& saved = record_.storages[storage];
    for (uint32_t call = saved.call; call != kNone; call = record_.calls[call].parent)
      if (blocks_[call].is_recomputed && saved.input_of != call) return call;
    return kNone;
  }
  uint64_t demand() const { return record_.events[event_].demand_bytes - dropped_bytes_; }
  double now() const { return (record_.events[event_].seconds + delay_) / manner_.speed; }

  void step(StepEvent& event) {
    if (is_of_call(event.kind)) {
      call(event);
    } else if (const uint32_t block = block_of(event.index); block != kNone) {
      inside(event, block);
    } else {
      storage(event);
    }
    const bool is_sampled =
        is_of_call(event.kind) || event.kind == StepEventKind::kSaved || event.kind == StepEventKind::kWanted;
    event.demand_bytes = demand();
    event.seconds = is_sampled ? now() : event.seconds;
  }

  void call(const StepEvent& event) {
    const ModuleCall& made = record_.calls[event.index];
    BlockState& block = blocks_[event.index];
    if (event.kind == StepEventKind::kReturned) {
      if (block.is_recomputed) dropped_bytes_ += block.saved_bytes;
      block.has_returned = true;
      checked_.returned(calls_[event.index], demand(), now());
      take_actions();
      return;
    }
    const uint32_t parent = made.parent == kNone ? kNone : calls_[made.parent];
    calls_[event.index] = checked_.entered(made, parent, demand(), now());
    take_actions();
    block.is_recomputed = checked_.follower.is_recomputed(made.key);
    played_.recomputed += block.is_recomputed ? 1 : 0;
  }

  // Of what is saved in a block, nothing is told. When it is first wanted, the block's arguments are.
  void inside(StepEvent& event, uint32_t call) {
    BlockState& block = blocks_[call];
    const uint64_t size_bytes = record_.storages[event.index].size_bytes;
    if (event.kind == StepEventKind::kSaved) block.saved_bytes += size_bytes;
    if (event.kind == StepEventKind::kWanted && !block.has_run_again) {
      block.has_run_again = true;
      for (const auto& [storage, saved_in] : record_.saves) {
        const bool is_input = saved_in == call && block_of(storage) == kNone;
        if (is_input && storages_[storage].number != UINT64_MAX) want(storage);
      }
      dropped_bytes_ -= block.saved_bytes;
      delay_ += record_.events[record_.calls[call].returned_at].seconds -
                record_.events[record_.calls[call].entered_at].seconds;
      checked_.missed(demand());
    }
    event.index = kNone;
  }

  void storage(const StepEvent& event) {
    Storage& one = storages_[event.index];
    const RecordedStorage& saved = record_.storages[event.index];
    if (event.kind == StepEventKind::kSaved) {
      const auto call = [&](uint32_t index) { return index == kNone ? kNone : calls_[index]; };
      const NewStorage named{saved.key, saved.size_bytes, call(saved.call), call(saved.input_of)};
      one.number = checked_.saved(named, demand(), now());
      indices_[one.number] = event.index;
    } else if (event.kind == StepEventKind::kFree) {
      one.free_at = event_;
      checked_.became_free(one.number);
    } else if (event.kind == StepEventKind::kWanted) {
      if (!is_read_by_blocks_alone(event.index)) want(event.index);
      return;
    } else {
      checked_.dropped(one.number);
      end_departure(event.index);
      one = {};
    }
    take_actions();
  }

  // They have read it as they ran again.
  bool is_read_by_blocks_alone(uint32_t storage) const {
    bool is_read = false;
    for (const auto& [saved, call] : record_.saves) {
      if (saved != storage) continue;
      if (!blocks_[call].is_recomputed) return false;
      is_read = true;
    }
    return is_read;
  }

  void want(uint32_t storage) {
    checked_.wanted(storages_[storage].number, demand(), now());
    take_actions();
    load(storage);
    end_departure(storage);
    storages_[storage].free_at = kNone;
  }

  Departure& departure_of(uint32_t storage) {
    Storage& one = storages_[storage];
    if (one.departure == kNone) {
      one.departure = static_cast<uint32_t>(played_.done.departures.size());
      const auto count = static_cast<uint32_t>(record_.events.size());
      played_.done.departures.push_back({storage, event_, event_, kNoEvent, kNoEvent, count});
    }
    return played_.done.departures[one.departure];
  }

  void leave(uint32_t storage) {
    if (std::exchange(storages_[storage].is_away, true)) return;
    departure_of(storage).release_at = event_;
    away_bytes_ += record_.storages[storage].size_bytes;
    played_.moved_bytes += record_.storages[storage].size_bytes;
  }

  void load(uint32_t storage) {
    if (!std::exchange(storages_[storage].is_away, false)) return;
    departure_of(storage).load_at = event_;
    away_bytes_ -= record_.storages[storage].size_bytes;
  }

  void end_departure(uint32_t storage) {
    Storage& one = storages_[storage];
    if (std::exchange(one.is_away, false)) away_bytes_ -= record_.storages[storage].size_bytes;
    if (one.departure != kNone) played_.done.departures[std::exchange(one.departure, kNone)].end_at = event_;
  }

  void take_actions() {
    const StepActions& actions = checked_.follower.actions();
    for (const uint64_t number : actions.copies_out) departure_of(indices_.at(number));
    for (const uint64_t number : actions.releases) leave(indices_.at(number));
    for (const uint64_t number : actions.loads) load(indices_.at(number));
  }

  void evict_on_demand() {
    const uint64_t limit_bytes = rules_.limits.limit_bytes;
    if (demand() <= limit_bytes + away_bytes_) return;
    const uint64_t missing_bytes = demand() - limit_bytes - away_bytes_;
    played_.missing_bytes = std::max(played_.missing_bytes, missing_bytes);
    checked_.missed(demand());
    while (demand() > limit_bytes + away_bytes_) {
      checked_.follower.fell_short(missing_of_margin());
      uint32_t first = kNone;
      for (uint32_t storage = 0; storage < storages_.size(); ++storage) {
        if (storages_[storage].free_at == kNone || storages_[storage].is_away) continue;
        if (first == kNone || storages_[storage].free_at < storages_[first].free_at) first = storage;
      }
      if (first == kNone) return;
      leave(first);
    }
  }

  // As the ledger has it: what is useless of the limit, or what is short.
  uint64_t missing_of_margin() const {
    const uint64_t limit_bytes = rules_.limits.limit_bytes;
    const uint64_t useless_bytes = std::max(manner_.believed_limit_bytes, limit_bytes) - limit_bytes;
    const uint64_t margin_bytes = checked_.follower.margin_bytes();
    return useless_bytes > margin_bytes ? useless_bytes - margin_bytes : demand() - limit_bytes - away_bytes_;
  }

  void finish() {
    std::erase_if(played_.done.departures, [](const Departure& departure) { return departure.release_at == kNoEvent; });
    std::sort(played_.done.departures.begin(), played_.done.departures.end(),
              [](const Departure& left, const Departure& right) { return left.end_at < right.end_at; });
    played_.done.actions = actions_of(played_.done.departures);
    if (manner_.measured_seconds > 0 && checked_.follower.event_count() > 0)
      checked_.follower.set_times({{0, 0}, {checked_.follower.event_count() - 1, manner_.measured_seconds}});
    StepRules rules = rules_;
    if (manner_.believed_limit_bytes > 0) rules.limits.limit_bytes = manner_.believed_limit_bytes;
    checked_.end_step(rules);
  }

  CheckedFollower& checked_;
  const StepRecord& record_;  // of a step that recomputes nothing
  const StepRules& rules_;
  const Manner manner_;
  std::vector<Storage> storages_;
  std::vector<BlockState> blocks_;  // by call
  std::vector<uint32_t> calls_;     // their indices in the step
  std::map<uint64_t, uint32_t> indices_;
  uint64_t away_bytes_ = 0, dropped_bytes_ = 0;
  double delay_ = 0;
  uint32_t event_ = 0;
  PlayedStep played_;
};

inline PlayedStep play(CheckedFollower& checked, const StepRecord& record, const StepRules& rules,
                       const Manner& manner = {}) {
  return StepPlayer(checked, record, rules, manner).play();
}

// A follower's knowledge of a step without misses: nothing is sampled when a storage becomes free or is dropped.
inline StepRecord as_recorded(StepRecord record) {
  std::vector<bool> is_free(record.storages.size(), false);
  for (size_t index = 0; index < record.events.size(); ++index) {
    StepEvent& event = record.events[index];
    if (is_of_call(event.kind)) continue;
    const bool was_free = is_free[event.index];
    is_free[event.index] = event.kind == StepEventKind::kFree;
    if (event.kind == StepEventKind::kSaved || event.kind == StepEventKind::kWanted) continue;
    event.seconds = record.events[index - 1].seconds;
    event.demand_bytes = record.events[index - 1].demand_bytes;
    if (event.kind != StepEventKind::kDropped || !was_free) continue;
    event.demand_bytes -= std::min(event.demand_bytes, record.storages[event.index].size_bytes);
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
inline StepRules rules_at(const StepLimits& limits) {
  StepRules rules;
  rules.limits = limits;
  return rules;
}

inline StepRules copies_only(const StepRecord& record, uint64_t percent) {
  StepRules rules = rules_at(at_limit(part_of_peak(record, percent)));
  rules.may_recompute = false;
  return rules;
}

inline StepRules mixed(const StepRecord& record, uint64_t percent) {
  return rules_at(at_limit(part_of_peak(record, percent)));
}

inline StepRecord with_base(StepRecord record, int64_t bytes) {
  for (StepEvent& event : record.events)
    event.demand_bytes = static_cast<uint64_t>(static_cast<int64_t>(event.demand_bytes) + bytes);
  return record;
}

}  // namespace ebbtide::policy
