#include "policy/lms/step_record.h"

#include <algorithm>

namespace ebbtide::policy {

void set_times(StepRecord& record, const std::vector<std::pair<uint32_t, double>>& seconds_of_events) {
  std::vector<StepEvent>& events = record.events;
  uint32_t begin = kNone;
  double former_seconds = 0, begin_seconds = 0;  // of that event, before and now
  for (const auto& [end, end_seconds] : seconds_of_events) {
    if (end >= events.size() || (begin != kNone && end < begin)) continue;
    const double end_before = events[end].seconds, whole = end_before - former_seconds;
    for (uint32_t event = begin == kNone ? 0 : begin + 1; event < end; ++event) {
      const double part = whole > 0 ? std::clamp((events[event].seconds - former_seconds) / whole, 0.0, 1.0) : 0;
      events[event].seconds = begin == kNone ? end_seconds : begin_seconds + part * (end_seconds - begin_seconds);
    }
    if (begin != end) former_seconds = end_before;
    begin = end;
    begin_seconds = events[end].seconds = end_seconds;
  }
  for (size_t event = begin; begin != kNone && event < events.size(); ++event) events[event].seconds = begin_seconds;
}

}  // namespace ebbtide::policy
