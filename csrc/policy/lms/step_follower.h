#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "policy/lms/step_plan.h"
#include "policy/lms/step_record.h"

// Records each training step, and follows the plan that was made from an equal step before. Used by the torch extension
// as well: standard C++ only. Not thread-safe.
//
// - Steps are equal if they save storages of the same sizes and want the same ones, in the same order. When a storage
//   becomes free or is dropped may differ: the actions that belong there happen as often.
// - A step that differs from every known one has deviated. It gets no further actions, its storages have to be
//   reclaimed on demand, and it is planned for at its end.
// - A few different steps are known at once. A step is followed as long as its beginning equals that of one of them.
namespace ebbtide::policy {

// Storages, numbered as saved() returned them. The caller does them in this order, and skips what no longer applies:
// it may have reclaimed or loaded a storage on demand meanwhile.
struct StepActions {
  std::vector<uint64_t> copies_out;  // their copies to the host begin
  std::vector<uint64_t> releases;    // they give up their device memory, which later work may use after the copy
  std::vector<uint64_t> loads;       // they get device memory, and their copies to the device begin; in order of use
};

class StepFollower {
 public:
  // demand_bytes: what the device would hold now if nothing had left it. now: seconds from any start; a time in which
  // the step waited for copies should not count. Each call replaces actions().

  // The number of a new storage. It stays unique over the steps.
  uint64_t saved(uint64_t size_bytes, uint64_t demand_bytes, double now);
  // From now on only the graph refers to it.
  void became_free(uint64_t storage);
  void wanted(uint64_t storage, uint64_t demand_bytes, double now);
  // The graph gave it up.
  void dropped(uint64_t storage);
  // An allocation did not fit: with it, the demand would have been this.
  void missed(uint64_t demand_bytes);
  // The next call begins another step. Storages that still live are left to the caller: no action names them any more.
  void end_step(const StepLimits& limits);

  const StepActions& actions() const { return actions_; }
  // Whether this step has followed a plan so far. If not, storages have to be reclaimed on demand.
  bool is_following() const { return followed_ != nullptr; }
  // Of the plan that is followed now: by how much it exceeds the limit. What exceeds it is reclaimed on demand as well.
  uint64_t excess_bytes() const { return followed_ != nullptr ? followed_->plan.excess_bytes : 0; }
  uint64_t plans_made() const { return plans_made_; }

 private:
  // A step that was recorded, and what is planned for equal ones.
  struct KnownStep {
    StepRecord record;
    std::vector<uint32_t> turns;         // its events that equal steps have in common: saved and wanted
    std::vector<uint64_t> fingerprints;  // of the turns up to each of them
    StepLimits limits;
    StepPlan plan;
  };
  struct Storage {
    bool is_free = false;
    bool is_gone = false;
    bool is_copied = false;    // a copy out was asked for since it became free
    bool is_released = false;  // and a release
    bool is_copy_due = false;  // as soon as it is free
    bool is_release_due = false;
  };

  void clear_actions();
  bool note(StepEventKind kind, uint64_t storage, uint64_t demand_bytes, double now);
  void take_turn(uint64_t what);
  void advance_without_turn();
  void advance_to(uint32_t event);
  void join(uint32_t event);
  void act(StepActionKind kind, uint32_t index);
  void make_plan_for(KnownStep& known, const StepLimits& limits);
  void keep_demands(const KnownStep& known);
  bool is_outdated(const KnownStep& known, const StepLimits& limits) const;
  bool is_of_this_step(uint64_t storage) const {
    return storage >= first_storage_ && storage - first_storage_ < storages_.size();
  }

  std::list<KnownStep> known_;  // the latest first
  KnownStep* followed_ = nullptr;
  uint64_t plans_made_ = 0;
  StepActions actions_;
  // This step.
  uint64_t first_storage_ = 0;  // the number of its first storage
  uint64_t next_storage_ = 0;
  bool is_recorded_ = true;  // it has no more than kMostStepEvents
  double began_ = 0;
  StepRecord record_;
  std::vector<uint32_t> turns_;
  std::vector<uint64_t> fingerprints_;
  std::vector<Storage> storages_;
  // In the plan that is followed.
  uint32_t next_event_ = 0;  // the first one whose actions were not done
  size_t next_action_ = 0;
};

}  // namespace ebbtide::policy
