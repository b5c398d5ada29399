#include "policy/lms/step_record.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

#include "policy/lms/mix.h"

namespace ebbtide::policy {
namespace {

constexpr size_t kTypicalPart = 8;  // of intervals that are alike, the shortest one in so many is typical

// Of each event: equal where modules that are built alike do alike with inputs of equal sizes.
std::vector<uint64_t> likenesses_of(const StepRecord& record) {
  const auto of_call = [&](uint32_t call) {
    if (call >= record.calls.size()) return uint64_t{0};
    const ModuleCall& made = record.calls[call];
    return mix(mix(made.kind != 0 ? made.kind : ~made.module) + made.input_bytes);
  };
  std::vector<uint64_t> of_storages, likenesses;
  std::unordered_map<uint32_t, uint64_t> saves;  // of each call so far
  for (const RecordedStorage& storage : record.storages)
    of_storages.push_back(mix(mix(of_call(storage.call) + saves[storage.call]++) + storage.size_bytes) +
                          of_call(storage.input_of));
  for (const StepEvent& event : record.events) {
    uint64_t of_index = 0;
    if (is_of_call(event.kind)) {
      of_index = of_call(event.index);
    } else if (event.index < of_storages.size()) {
      of_index = of_storages[event.index];
      if (event.kind == StepEventKind::kWanted) of_storages[event.index] = mix(of_index);  // the next want is another
    }
    likenesses.push_back(mix(of_index + static_cast<uint64_t>(event.kind)));
  }
  return likenesses;
}

}  // namespace

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

void use_typical_times(StepRecord& record) {
  std::vector<StepEvent>& events = record.events;
  const std::vector<StepEvent> before = events;
  const std::vector<uint64_t> likenesses = likenesses_of(record);
  std::unordered_map<uint64_t, std::vector<double>> alike;
  const auto for_intervals = [&](const auto& body) {
    size_t begin = 0;
    for (size_t end = 1; end < before.size(); ++end) {
      if (!is_marked(before[end].kind)) continue;
      const double seconds = before[end].seconds - before[begin].seconds;
      body(begin, end, mix(likenesses[begin]) + likenesses[end], std::isfinite(seconds) ? std::max(seconds, 0.0) : 0);
      begin = end;
    }
    return begin;
  };
  for_intervals([&](size_t, size_t, uint64_t kind, double seconds) { alike[kind].push_back(seconds); });
  for (auto& [kind, seconds] : alike) {
    const auto typical = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / kTypicalPart);
    std::nth_element(seconds.begin(), typical, seconds.end());
    seconds = {*typical};
  }
  const size_t last = for_intervals([&](size_t begin, size_t end, uint64_t kind, double seconds) {
    const double typical = alike[kind].front(), part = seconds > 0 ? typical / seconds : 0;
    for (size_t event = begin + 1; event < end; ++event) {
      const double since = before[event].seconds - before[begin].seconds;
      events[event].seconds = events[begin].seconds + (since > 0 ? std::min(part * since, typical) : 0);
    }
    events[end].seconds = events[begin].seconds + typical;
  });
  for (size_t event = last + 1; event < events.size(); ++event) events[event].seconds = events[last].seconds;
}

}  // namespace ebbtide::policy
