#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include "policy/lms/flushes.h"
#include "policy/lms/margin.h"
#include "policy/lms/step_choice.h"
#include "policy/lms/tried_choice.h"

// A step that was recorded, and what is planned for others like it. Used by the torch extension as well: standard C++
// only. Not thread-safe.
namespace ebbtide::policy {

// What holds for the next steps.
struct StepRules {
  StepLimits limits;
  std::unordered_set<uint64_t> forbidden;  // modules that can't be recomputed
  bool may_recompute = true;
  std::shared_ptr<const ForcedChoice> forced;  // null: the fastest choice is looked for
  bool is_timed = true;                        // the times of the step that ends are those of the device
  bool are_compared = true;    // the steps' times tell which choice is better: other ranks' choices don't slow them
  bool was_disturbed = false;  // it did more than others like it, and teaches nothing
  bool has_flushed = false;    // torch gave back its cache in it
  bool had_update = true;      // an optimizer has stepped after it: there may be no gradients now
  uint64_t demand_bytes = 0;   // now, after the step and before the next one
  uint64_t least_limit_bytes = UINT64_MAX;  // when memory was short in the step
};

class KnownStep {
 public:
  // useless_bytes: what was free at most, in pieces that were too small.
  KnownStep(StepRecord record, const StepRules& rules, uint64_t useless_bytes = 0);

  // Whether later steps will tell which choice is the best.
  bool is_settled() const { return is_settled_; }
  const TriedChoice& current() const { return choices_[current_]; }
  const std::vector<TriedChoice>& choices() const { return choices_; }
  const StepRecord& whole() const { return whole_; }
  const StepLimits& limits() const { return limits_; }
  // Modules that choices for it may recompute, outermost ones; none if no choice recomputes any.
  std::vector<uint64_t> candidates() const;
  // The least limit for this demand that makes nothing leave.
  uint64_t limit_without_evictions(uint64_t demand_bytes) const;
  // What the current plan leaves free of the limit.
  uint64_t margin_bytes() const { return margin_within(limits_); }
  // The best choice under another limit.
  StepChoice choice_within(uint64_t limit_bytes) const;
  // How alike it is to a step that opens with this storage: less is better; kNone: not at all.
  uint32_t distance(const RecordedStorage& first) const;
  // A step has ended that followed the current choice. Returns whether what the next one will follow is new.
  bool note(StepRecord step, const MatchedEvents& matched, const Shortages& shortages, StepRules rules);

  // Whether torch's cache is to be given back before the next step.
  bool must_give_back() const { return advice_ == Flushes::Advice::kGiveBack; }

  // Whether the last steps had less than half of what their plans name, as those of another model of the same classes.
  bool is_another_program() const { return steps_of_another_ >= kStepsOfAnother; }

  void choose(const StepRules& rules);

 private:
  static constexpr int kStepsOfAnother = 4;

  StepLimits with_margin(StepLimits limits) const;
  uint64_t margin_within(const StepLimits& limits) const;
  bool learn_margin(uint64_t missing_bytes, const StepLimits& held);
  std::vector<Block> blocks_for(const StepRules& rules) const;
  void choose(const StepRules& rules, bool are_other);
  std::vector<StepChoice> choices_for(const StepRules& rules, uint64_t rooms) const;
  bool makes_room(const StepRules& rules);
  bool learn(StepRecord step, const MatchedEvents& matched, const StepRules& rules, bool must_choose);
  bool has_changed(const StepRules& rules) const;
  bool has_other_times(const StepRules& rules) const;
  bool take_next_choice();
  bool settle();

  StepRecord whole_;           // of a step that recomputed nothing
  StepRules rules_;            // of the choices
  StepLimits limits_;          // of the plans: other sizes that differ by little change only them
  double chosen_seconds_ = 0;  // that the step takes without a limit, as known where the choices were made
  Margin margin_;
  Margin unmoved_margin_;  // in pages, of plans that evict nothing, beside a fixed part of the limit
  Flushes flushes_;        // in pages, of steps that evict nothing, under the current choice
  Flushes::Advice advice_ = Flushes::Advice::kKeep;
  std::vector<TriedChoice> choices_;
  size_t current_ = 0;
  uint64_t rooms_ = 0;        // that choices leave free, because steps flushed in vain
  bool is_settled_ = false;   // each choice was measured, and the best is current
  int steps_of_another_ = 0;  // in a row
  int shortages_left_ = 2;    // choices that shortages ask for
  int retimings_left_ = 3;    // choices that other times or rates ask for: those of a busy machine never settle
};

}  // namespace ebbtide::policy
