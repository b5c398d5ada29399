#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <utility>
#include <vector>

#include "policy/lms/known_step.h"
#include "policy/lms/step_record.h"

// Records each training step, and follows the plan that was made from one like it. Used by the torch extension as well:
// standard C++ only. Not thread-safe.
//
// - A plan is followed by names, not by sizes: events and storages are found in it by the module call that they belong
//   to, and by their order within that. What the plan does not know is passed over, and what it knows and does not
//   happen is caught up with at the next event that does.
// - A storage that the plan does not know gets no actions: it leaves on demand.
// - A few steps that open differently are known at once.
namespace ebbtide::policy {

// Storages, numbered as saved() returned them. The caller does them in this order, and skips what no longer applies:
// it may have reclaimed or loaded a storage on demand meanwhile.
struct StepActions {
  std::vector<uint64_t> copies_out;  // their copies to the host begin
  std::vector<uint64_t> releases;    // they give up their device memory, which later work may use after the copy
  std::vector<uint64_t> loads;       // they get device memory, and their copies to the device begin; in order of use
};

struct NewCall {
  uint64_t key = 0, name = 0, module = 0;
  uint64_t kind = 0;         // equal for modules that are built alike
  uint32_t parent = kNone;   // as entered() returned it
  uint64_t input_bytes = 0;  // of its arguments' storages that may leave
};

struct NewStorage {
  uint64_t key = 0;
  uint64_t size_bytes = 0;
  uint32_t call = kNone;      // as entered() returned them
  uint32_t input_of = kNone;  // the outermost call that got it as an argument
  bool stays = false;         // no plan evicts it
};

class StepFollower {
 public:
  // demand_bytes: what the device would hold now if nothing had left it. now: seconds from any start; a time in which
  // the step waited for copies should not count. Each call replaces actions().

  // The call of a module begins. The result is the call's index in this step.
  uint32_t entered(const NewCall& call, uint64_t demand_bytes, double now);
  void returned(uint32_t call, uint64_t demand_bytes, double now);
  // The number of a new storage. It stays unique over the steps.
  uint64_t saved(const NewStorage& storage, uint64_t demand_bytes, double now);
  // Another call saved it, too; or the storage is an argument of a call that saved it.
  void saved_again(uint64_t storage, const NewStorage& named);
  void saved_input(uint32_t call, uint64_t size_bytes);
  // From now on only the graph refers to it.
  void became_free(uint64_t storage);
  void wanted(uint64_t storage, uint64_t demand_bytes, double now);
  // The graph gave it up.
  void dropped(uint64_t storage);
  // An allocation did not fit: with it, the demand would have been this.
  void missed(uint64_t demand_bytes);
  // And so many bytes were missing, beside so many that were free, in pieces that were too small.
  void fell_short(uint64_t missing_bytes, uint64_t useless_bytes = 0);
  // The times of some events, ascending, as a device measured them: those between are moved accordingly.
  void set_times(const std::vector<std::pair<uint32_t, double>>& seconds_of_events);
  // The next call begins another step. Storages that still live are left to the caller: no action names them any more.
  void end_step(const StepRules& rules);
  // The step that has just begun, and saved nothing yet, gets another choice.
  void choose_again(const StepRules& rules);
  // As end_step(), and nothing is learned of this one.
  void abandon_step();
  // Other rules hold: what is known is forgotten, and so is the step that has begun, once it ends.
  void forget_known();

  const StepActions& actions() const { return actions_; }
  uint32_t event_count() const { return static_cast<uint32_t>(record_.events.size()); }
  uint64_t step() const { return step_; }  // indices of calls are those of one step
  // Whether times are of use: those of a step without a plan, and of one whose plan is not settled.
  bool wants_times() const { return followed_ == nullptr || !followed_->is_settled(); }
  // Whether this step has followed a plan so far. If not, storages have to be reclaimed on demand.
  bool is_following() const { return followed_ != nullptr; }
  // What this step has chosen; null while it follows no plan.
  const StepChoice* choice() const { return followed_ != nullptr ? &followed_->current().choice() : nullptr; }
  bool is_recomputed(uint64_t call_key) const {
    return followed_ != nullptr && followed_->current().recomputes(call_key);
  }
  bool has_saved() const { return !record_.storages.empty(); }
  // The step that ended last; null before the first one.
  const KnownStep* latest() const { return known_.empty() ? nullptr : &known_.front().step; }
  // Of the step that ended last; null before the first one.
  const StepChoice* latest_choice() const { return known_.empty() ? nullptr : &known_.front().step.current().choice(); }
  // Of the optimizer states, what the choices for the steps of late have on the host.
  uint64_t state_bytes() const;
  // Steps count as such only if they end from now on: states lie elsewhere, or there is another limit.
  void forget_state_bytes() { states_known_from_ = step_; }
  // What plans leave free of the limit, of the step that is followed, or that ended last.
  uint64_t margin_bytes() const {
    return followed_ != nullptr ? followed_->margin_bytes() : known_.empty() ? 0 : known_.front().step.margin_bytes();
  }
  // Whether torch's cache is to be given back now that a step has ended. It is said once.
  bool take_give_back() { return std::exchange(must_give_back_, false); }
  bool has_plan_for(uint64_t storage) const;
  uint64_t plans_made() const { return plans_made_; }

 private:
  struct Storage {
    uint32_t planned = kNone;  // which storage of the plan it is
    uint32_t wants = 0;
    bool is_free = false;
    bool is_gone = false;
    bool is_copied = false;    // a copy out was asked for since it became free
    bool is_released = false;  // and a release
  };
  // What the plan has asked for so far: it may come before the storage is there, or free.
  struct Due {
    uint64_t number = UINT64_MAX;  // of the storage in this step
    bool is_copy_due = false;
    bool is_release_due = false;
  };

  void clear_actions();
  bool note(StepEventKind kind, uint32_t index, uint64_t demand_bytes, double now);
  void reach(StepEventKind kind, uint64_t key, uint32_t occurrence);
  void follow(KnownStep& known);
  void bind(uint64_t storage, uint64_t key);
  void do_due(uint64_t storage);
  void advance_without_anchor();
  void advance_to(uint32_t event);
  void act(StepActionKind kind, uint32_t planned);
  KnownStep* nearest(const RecordedStorage& first, uint32_t most_distance);
  KnownStep* known_like_this();
  bool is_of_this_step(uint64_t storage) const {
    return storage >= first_storage_ && storage - first_storage_ < storages_.size();
  }

  struct Known {
    KnownStep step;
    uint64_t ended = 0;  // the latest one that followed it
  };

  std::list<Known> known_;  // the latest first
  KnownStep* followed_ = nullptr;
  bool is_outdated_ = false;  // all that is known, and this step
  bool must_give_back_ = false;
  uint64_t plans_made_ = 0;
  uint64_t states_known_from_ = 0;  // the first step
  StepActions actions_;
  // This step.
  uint64_t step_ = 0;
  uint64_t first_storage_ = 0;  // the number of its first storage
  uint64_t next_storage_ = 0;
  bool is_recorded_ = true;  // it has no more than kMostStepEvents
  double began_ = 0;
  StepRecord record_;
  std::vector<Storage> storages_;
  // In the plan that is followed.
  std::vector<Due> due_;  // of its storages
  MatchedEvents matched_;
  Shortages shortages_;
  uint64_t most_useless_bytes_ = 0;  // at a time, also where no plan is followed
  uint32_t next_event_ = 0;          // the first one whose actions were not done
  size_t next_action_ = 0;
};

}  // namespace ebbtide::policy
