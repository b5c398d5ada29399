// A follower of training steps whose actions are checked.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "policy/lms/step_follower.h"

namespace ebbtide::policy {

// Calls a follower, and checks that each action makes sense after the calls and actions before it.
class CheckedFollower {
 public:
  uint32_t entered(const ModuleCall& call, uint32_t parent, uint64_t demand_bytes, double now) {
    const uint32_t index =
        follower.entered({call.key, call.name, call.module, call.kind, parent, call.input_bytes}, demand_bytes, now);
    check();
    return index;
  }
  void returned(uint32_t call, uint64_t demand_bytes, double now) {
    follower.returned(call, demand_bytes, now);
    check();
  }
  uint64_t saved(const NewStorage& saved, uint64_t demand_bytes, double now) {
    const uint64_t storage = follower.saved(saved, demand_bytes, now);
    EXPECT_TRUE(storages_.emplace(storage, Storage{}).second) << "numbers are unique";
    check();
    return storage;
  }
  void saved_again(uint64_t storage, uint64_t key, uint32_t call) {
    follower.saved_again(storage, {.key = key, .call = call});
    check();
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
    for (const auto* list : {&follower.actions().copies_out, &follower.actions().releases})
      EXPECT_EQ(std::find(list->begin(), list->end(), storage), list->end()) << "it is wanted now";
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
  void end_step(const StepRules& rules) {
    follower.end_step(rules);
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
    const StepActions& actions = follower.actions();
    for (const uint64_t storage : actions.copies_out) {
      EXPECT_TRUE(storages_.at(storage).is_free);
      EXPECT_FALSE(std::exchange(storages_.at(storage).is_copied, true));
    }
    for (const uint64_t storage : actions.releases) {
      EXPECT_TRUE(storages_.at(storage).is_free && storages_.at(storage).is_copied);
      EXPECT_FALSE(std::exchange(storages_.at(storage).is_released, true));
    }
    for (const uint64_t storage : actions.loads) {
      EXPECT_TRUE(std::exchange(storages_.at(storage).is_released, false));
      EXPECT_EQ(std::find(actions.releases.begin(), actions.releases.end(), storage), actions.releases.end())
          << "in vain";
      storages_.at(storage).is_copied = false;
    }
  }

  std::map<uint64_t, Storage> storages_;
};

}  // namespace ebbtide::policy
