#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "policy/lms/step_record.h"

// Calls of modules whose saved tensors are dropped and made again in backward. Used by the torch extension as well:
// standard C++ only.
namespace ebbtide::policy {

// A call that may be recomputed, and what that does to the step.
struct Block {
  uint32_t call = kNone;
  uint64_t dropped_bytes = 0;    // of storages that only this call saves, that it made, and that the program lets go
  uint64_t added_bytes = 0;      // of arguments that nothing saves but recomputing
  uint32_t backward_at = kNone;  // the first event that wants one of the dropped storages
  double forward_seconds = 0;
};

// The blocks of a step: calls outside one another. The largest ones that hold no more than an eighth of all that the
// step saves, or have no calls inside that hold most of theirs. forbidden: modules that can't be recomputed; calls
// inside them are looked at instead. In the order of their calls.
std::vector<Block> find_blocks(const StepRecord& record, const std::unordered_set<uint64_t>& forbidden);

// The same step if the blocks are recomputed: with the same events, of which those that do not happen name no storage
// (index kNone). From a block's return to its backward what it drops is not in use. What it reads and did not make is
// wanted when its backward begins. Within a block's forward the demand stays, though most of it is free earlier then.
StepRecord with_recomputation(const StepRecord& record, const std::vector<Block>& blocks);

}  // namespace ebbtide::policy
