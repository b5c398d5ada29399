#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "policy/lms/known_step.h"

// What a plan does with what a step saves, for people. Used by the torch extension as well: standard C++ only.
namespace ebbtide::policy {

// Of what calls of one module save themselves, not those inside them. Module 0: outside all calls.
struct ModuleReport {
  uint64_t module = 0;
  uint64_t kept_bytes = 0, evicted_bytes = 0, recomputed_bytes = 0;
};

struct Forecast {
  double seconds = 0;
  uint64_t moved_bytes = 0;  // to the host
  uint64_t recomputed_calls = 0;
  uint64_t state_bytes = 0;  // of optimizer states, on the host
};

// A choice for the step, and what steps that followed it took.
struct ChoiceReport {
  Forecast forecast;
  double measured_seconds = 0;  // 0: none did
  bool is_current = false;
};

// Device memory in use from a time on, in seconds since the step began, without waits.
using Usage = std::vector<std::pair<double, uint64_t>>;

struct StepReport {
  uint64_t limit_bytes = 0;
  uint64_t peak_bytes = 0;  // of which limit nothing would have to leave
  std::vector<ModuleReport> modules;
  Usage without, with;  // the plan
  std::vector<ChoiceReport> choices;
};

// elsewhere_bytes: of the plan's limit and of the demand, what takes no device memory, such as weights on the host.
StepReport report_on(const KnownStep& step, uint64_t elsewhere_bytes);

// Of a step within another limit.
Forecast forecast_at(const KnownStep& step, uint64_t limit_bytes);

}  // namespace ebbtide::policy
