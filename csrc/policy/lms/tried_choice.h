#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "policy/lms/step_choice.h"
#include "policy/lms/step_record.h"

// A plan that steps follow by the names of their events, and what they showed of it. Used by the torch extension as
// well: standard C++ only. Not thread-safe.
namespace ebbtide::policy {

// An event that names itself: the same in each step that is alike, whatever sizes its storages have. 0: none.
uint64_t anchor(StepEventKind kind, uint64_t key, uint32_t occurrence);

// The anchors of a record's events.
std::vector<uint64_t> anchors_of(const StepRecord& record);

// Where the events of a step were found in the plan: pairs of the plan's event and the step's, both ascending.
using MatchedEvents = std::vector<std::pair<uint32_t, uint32_t>>;

// Events of a step at which memory was short in spite of the plan, and how many bytes were missing.
using Shortages = std::vector<std::pair<uint32_t, uint64_t>>;

// One choice for the step, and what the steps that followed it showed.
class TriedChoice {
 public:
  explicit TriedChoice(StepChoice choice);

  const StepPlan& plan() const { return choice_.plan; }
  const StepChoice& choice() const { return choice_; }
  bool recomputes(uint64_t call_key) const { return recomputed_.contains(call_key); }
  // Whether the step called what is recomputed: it does not show all that it saves then.
  bool has_recomputed(const StepRecord& step) const;
  // Whether the storages of both that have a name in common are as large in all.
  bool is_as_large(const StepRecord& step) const;
  // Whether the step had less than half of what the plan names.
  bool is_of_another(const MatchedEvents& matched) const;
  // kNone: the plan has no such event, or no such storage.
  uint32_t event_of(uint64_t anchor) const;
  uint32_t storage_of(uint64_t key) const;

  // A step has followed it: the demands of the last steps replace the expected ones, and sizes follow slowly.
  void note(const StepRecord& step, const MatchedEvents& matched, double seconds);
  // The most bytes that a step missed where its demand does not explain it. The plan is for the limit without a margin.
  uint64_t unexplained_bytes(const MatchedEvents& matched, const Shortages& shortages, const StepLimits& limits,
                             uint64_t margin_bytes) const;
  // Whether the demands of the last steps exceed the limit under this plan, or leave more of it than they need to.
  bool is_outdated(const StepLimits& limits) const;
  // By how much the most demand of the last steps exceeds that for which the choice was made.
  uint64_t growth_bytes() const;
  // Plans for the demands of the last steps.
  void plan_again(const StepLimits& limits);
  // A step that followed it and recomputed nothing, with the demands of the steps before where they were higher.
  StepRecord with_demands(StepRecord step, const MatchedEvents& matched) const;
  // The record from which the choice was made, with the demands of the steps that followed it.
  StepRecord with_growth(StepRecord whole) const;
  // What the step shows to take less time, without what it recomputed, does so in the record, too.
  void shorten(StepRecord& whole, const StepRecord& step, const MatchedEvents& matched) const;
  // Timed steps that followed it.
  size_t measured_steps() const { return step_seconds_.size(); }
  // The median of the steps that followed it, with what the optimizer's step takes longer; infinite before the first
  // one. That one does not count if there were others: it found the memory as another choice had left it.
  double measured_seconds() const;
  std::vector<uint64_t> away_bytes() const;  // at each event, under the plan

 private:
  // Measured less expected demand, of the last steps. Before these the record was right.
  struct Correction {
    std::array<int64_t, 4> bytes{};
    uint32_t count = 0;
    int64_t most() const;
  };

  void note_demands(const StepRecord& step, const MatchedEvents& matched);
  std::vector<uint64_t> corrected_demands() const;

  StepChoice choice_;
  std::vector<uint64_t> expected_;  // demands of the record before any correction
  std::unordered_set<uint64_t> recomputed_;
  std::unordered_map<uint64_t, uint32_t> events_;    // by anchor
  std::unordered_map<uint64_t, uint32_t> storages_;  // by key
  std::vector<Correction> corrections_;              // from an event of the plan to the next one that has any
  std::vector<double> step_seconds_;                 // of each that was measured
};

}  // namespace ebbtide::policy
