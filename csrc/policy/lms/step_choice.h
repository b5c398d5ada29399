#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "policy/lms/recomputation.h"
#include "policy/lms/step_plan.h"
#include "policy/lms/step_record.h"

// Which blocks of a step are recomputed, and which storages leave: the fastest mix that holds the limit. Used by the
// torch extension as well: standard C++ only.
namespace ebbtide::policy {

struct StepChoice {
  std::vector<Block> recomputed;
  StepRecord record;         // of a step that recomputes them
  StepPlan plan;             // for that, and for the limit with state_bytes
  uint64_t state_bytes = 0;  // of optimizer states that lie on the host
  double state_seconds = 0;  // that they cost
  double seconds = 0;        // forecast, of the step, with those
  uint64_t moved_bytes = 0;  // to the host, of what the step saves
};

// What the program demands in place of the fastest choice.
struct ForcedChoice {
  std::unordered_set<uint64_t> recomputed;  // names of calls
  uint64_t state_bytes = 0;                 // as of a choice
};

// How long the step takes under the plan: the device computes, and copies run in both directions beside it. It waits
// for copies out whose memory is given up, and for loads that are wanted.
double forecast_seconds(const StepRecord& record, const StepPlan& plan, const StepLimits& limits);

// Plans for the demands and sizes that its record has now.
void plan_again(StepChoice& choice, const StepLimits& limits);

// Those of a choice's plan.
StepLimits limits_of(StepLimits limits, const StepChoice& choice);

// The best choice first, then others that may turn out to be better: those of other kinds (no block, some blocks, all
// of them; in pages, the best one without evictions) whose forecast is within 1.2 of the best. In pages only if they
// evict less than each one before, or recompute less than each within 1.1. Choices that exceed the limit by less come
// before faster ones.
std::vector<StepChoice> choose_steps(const StepRecord& record, const StepLimits& limits,
                                     const std::vector<Block>& blocks);

// That which recomputes those of the blocks that are demanded.
StepChoice choose_forced(const StepRecord& record, const StepLimits& limits, const std::vector<Block>& blocks,
                         const ForcedChoice& forced);

}  // namespace ebbtide::policy
