#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "policy/lms/step_record.h"

// Which saved storages leave the device in a step, and when they leave and come back. Used by the torch extension as
// well: standard C++ only.
//
// At each event the device holds the recorded demand less what is away. That is at most the limit wherever any choice
// of free storages could reach it. A storage counts as away from its release until its load begins.
//
// - What is wanted farthest in the future leaves, as late as the limit allows. What backward wants first stays.
// - Copies out begin in the order of their releases. Each begins at the latest event from which the link could still
//   finish it and all that follow, with a margin. So they are spread over forward, and not one burst at its start.
// - Loads begin in the order of use, as early as memory allows, but no earlier than the link needs, with a margin.
//
// Times are estimates: a wrong one costs time, never memory. What happens between two events is not planned. Nothing
// begins at an event without a storage (index kNone): such a one does not happen.
namespace ebbtide::policy {

struct StepLimits {
  uint64_t limit_bytes = 0;         // device memory that may be in use
  double out_bytes_per_second = 0;  // of copies to the host
  double in_bytes_per_second = 0;   // of loads; both links work at once
  // Optimizer states that may lie on the host during the step. They leave as much more of the limit, and cross both
  // links in each step of the optimizer, once in so many steps.
  uint64_t state_bytes = 0;
  double steps_per_update = 1;
  // Free memory that is cached goes back to the driver in pages where it does not fit in one piece. That costs time,
  // most of all where memory leaves in the step.
  bool has_pages = false;
  // So much may be in use where nothing leaves, if that is more than limit_bytes: evictions leave free memory in
  // pieces.
  uint64_t unmoved_bytes = 0;
};

// Endless at a rate that makes no sense.
double copy_seconds(uint64_t size_bytes, double bytes_per_second);

inline constexpr uint32_t kNoEvent = kNone;

// One absence of a storage. The numbers are indices of events: free <= copy <= release < load <= end.
struct Departure {
  uint32_t storage = 0;
  uint32_t free_at = 0;
  uint32_t copy_at = 0;         // the copy to the host begins
  uint32_t release_at = 0;      // from here on it holds no device memory: what follows waits for the copy
  uint32_t load_at = kNoEvent;  // its load begins; kNoEvent: it is not wanted any more
  uint32_t end_at = 0;          // it is wanted or dropped, or the step ends
};

enum class StepActionKind : uint8_t { kCopyOut, kRelease, kLoad };

struct StepAction {
  uint32_t event = 0;
  StepActionKind kind = StepActionKind::kCopyOut;
  uint32_t departure = 0;  // index into StepPlan::departures
};

struct StepPlan {
  std::vector<Departure> departures;  // in the order of their ends
  std::vector<StepAction> actions;    // by event; at one event first the copies, then the releases, then the loads
  uint64_t excess_bytes = 0;          // by how much the limit cannot be held; 0: it holds everywhere

  // And needs to evict nothing.
  bool evicts_nothing() const { return departures.empty() && excess_bytes == 0; }
};

// What a plan for these limits keeps to.
uint64_t planned_limit(const StepLimits& limits, const StepPlan& plan);

// The record has at most kMostStepEvents events. Those that make no sense are ignored (an unknown storage, a second
// drop); times that go backwards count as no time.
StepPlan make_plan(const StepRecord& record, const StepLimits& limits);

}  // namespace ebbtide::policy
