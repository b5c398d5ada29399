#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "policy/lms/recomputation.h"
#include "policy/lms/step_plan.h"
#include "policy/lms/step_record.h"

// Which blocks of a step are recomputed, and which storages leave: the fastest mix that holds the limit. Used by the
// torch extension as well: standard C++ only.
namespace ebbtide::policy {

// What has to be away beyond the demand from an event on, since free memory lies in pieces: the most that this or an
// earlier event says. A plan that were tight again after the event would be short there in the next step.
using Margins = std::map<uint32_t, uint64_t>;

// The record with the margins as demand.
StepRecord with_margins(StepRecord record, const Margins& margins);

StepPlan plan_with(StepRecord record, const Margins& margins, const StepLimits& limits);

struct StepChoice {
  std::vector<Block> recomputed;
  StepRecord record;         // of a step that recomputes them
  StepPlan plan;             // for that, and for the limit with state_bytes
  uint64_t state_bytes = 0;  // of optimizer states that lie on the host
  double state_seconds = 0;  // that they cost
  double seconds = 0;        // forecast, of the step, with those
  uint64_t moved_bytes = 0;  // to the host, of what the step saves
};

// How long the step takes under the plan: the device computes, and copies run in both directions beside it. It waits
// for copies out whose memory is given up, and for loads that are wanted.
double forecast_seconds(const StepRecord& record, const StepPlan& plan, const StepLimits& limits);

// The limits where so many bytes of optimizer states lie on the host.
StepLimits with_states_away(StepLimits limits, uint64_t state_bytes);

// The best choice first, then others that may turn out to be better: those of other kinds (no block, some blocks, all
// of them) whose forecast is within 1.2 of the best. Choices that exceed the limit by less come before faster ones.
std::vector<StepChoice> choose_steps(const StepRecord& record, const Margins& margins, const StepLimits& limits,
                                     const std::vector<Block>& blocks);

}  // namespace ebbtide::policy
