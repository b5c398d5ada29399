#include "policy/lms/tried_choice.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "policy/lms/mix.h"

namespace ebbtide::policy {
namespace {

// Times of steps whose storages differ in all by more than this part are not compared.
constexpr double kSizeTolerance = 0.05;
// What a plan leaves of the limit unused, as a part of it, before it is made anew.
constexpr uint64_t kUnusedPart = 32;
// A demand that is higher than planned by less than this part of the limit does not explain a shortage.
constexpr uint64_t kLittlePart = 64;

std::vector<uint64_t> demands_of(const StepRecord& record) {
  std::vector<uint64_t> demands;
  demands.reserve(record.events.size());
  for (const StepEvent& event : record.events) demands.push_back(event.demand_bytes);
  return demands;
}

// Whether steps that follow the choice have it.
bool has_name(const StepEvent& event) { return has_anchor(event.kind) && event.index != kNone; }

int64_t most_between(const std::vector<uint64_t>& demands, size_t begin, size_t end) {
  uint64_t most = 0;
  for (size_t event = begin; event < end; ++event) most = std::max(most, demands[event]);
  return static_cast<int64_t>(most);
}

}  // namespace

uint64_t anchor(StepEventKind kind, uint64_t key, uint32_t occurrence) {
  if (!has_anchor(kind)) return 0;
  return mix(mix(mix(key) + static_cast<uint64_t>(kind)) + occurrence) | 1;
}

std::vector<uint64_t> anchors_of(const StepRecord& record) {
  std::vector<uint64_t> anchors(record.events.size(), 0);
  std::vector<uint32_t> wants(record.storages.size(), 0);
  for (size_t index = 0; index < anchors.size(); ++index) {
    const StepEvent& event = record.events[index];
    if (is_of_call(event.kind)) {
      if (event.index < record.calls.size()) anchors[index] = anchor(event.kind, record.calls[event.index].key, 0);
    } else if (event.index < record.storages.size()) {
      const uint32_t occurrence = event.kind == StepEventKind::kWanted ? wants[event.index]++ : 0;
      anchors[index] = anchor(event.kind, record.storages[event.index].key, occurrence);
    }
  }
  return anchors;
}

int64_t TriedChoice::Correction::most() const { return *std::max_element(bytes.begin(), bytes.end()); }

TriedChoice::TriedChoice(StepChoice choice)
    : choice_(std::move(choice)), expected_(demands_of(choice_.record)), corrections_(expected_.size()) {
  for (const Block& block : choice_.recomputed) recomputed_.insert(choice_.record.calls[block.call].key);
  const std::vector<uint64_t> anchors = anchors_of(choice_.record);
  for (uint32_t event = 0; event < anchors.size(); ++event)
    if (anchors[event] != 0) events_.emplace(anchors[event], event);
  for (uint32_t storage = 0; storage < choice_.record.storages.size(); ++storage)
    storages_.emplace(choice_.record.storages[storage].key, storage);
}

uint32_t TriedChoice::event_of(uint64_t anchor) const {
  const auto found = events_.find(anchor);
  return found == events_.end() ? kNone : found->second;
}

bool TriedChoice::is_of_another(const MatchedEvents& matched) const {
  const std::vector<StepEvent>& events = choice_.record.events;
  return 2 * matched.size() < static_cast<size_t>(std::count_if(events.begin(), events.end(), has_name));
}

uint32_t TriedChoice::storage_of(uint64_t key) const {
  const auto found = storages_.find(key);
  return found == storages_.end() ? kNone : found->second;
}

bool TriedChoice::has_recomputed(const StepRecord& step) const {
  const auto is_recomputed = [&](const ModuleCall& call) { return recomputes(call.key); };
  return !recomputed_.empty() && std::any_of(step.calls.begin(), step.calls.end(), is_recomputed);
}

bool TriedChoice::is_as_large(const StepRecord& step) const {
  double planned_bytes = 0, measured_bytes = 0;
  for (const RecordedStorage& measured : step.storages) {
    const uint32_t storage = storage_of(measured.key);
    if (storage == kNone) continue;
    planned_bytes += static_cast<double>(choice_.record.storages[storage].size_bytes);
    measured_bytes += static_cast<double>(measured.size_bytes);
  }
  return std::abs(measured_bytes - planned_bytes) <= kSizeTolerance * planned_bytes;
}

void TriedChoice::note(const StepRecord& step, const MatchedEvents& matched, double seconds) {
  if (seconds > 0) step_seconds_.push_back(seconds);
  note_demands(step, matched);
  for (const RecordedStorage& measured : step.storages) {
    const uint32_t storage = storage_of(measured.key);
    if (storage == kNone) continue;
    uint64_t& bytes = choice_.record.storages[storage].size_bytes;
    bytes = bytes - bytes / 4 + measured.size_bytes / 4;
    bytes += std::min<uint64_t>(3, measured.size_bytes - std::min(measured.size_bytes, bytes));  // equal sizes stay
  }
}

double TriedChoice::measured_seconds() const {
  if (step_seconds_.empty()) return std::numeric_limits<double>::infinity();
  std::vector<double> later(step_seconds_.size() == 1 ? step_seconds_.begin() : step_seconds_.begin() + 1,
                            step_seconds_.end());
  const auto middle = later.begin() + static_cast<std::ptrdiff_t>((later.size() - 1) / 2);
  std::nth_element(later.begin(), middle, later.end());
  return *middle + choice_.state_seconds;
}

void TriedChoice::note_demands(const StepRecord& step, const MatchedEvents& matched) {
  const std::vector<uint64_t> measured = demands_of(step);
  const std::vector<StepEvent>& events = choice_.record.events;
  for (size_t index = 0; index < matched.size(); ++index) {
    const auto& [planned_at, measured_at] = matched[index];
    const bool is_last = index + 1 == matched.size();
    const size_t planned_end = is_last ? expected_.size() : matched[index + 1].first;
    const size_t measured_end = is_last ? measured.size() : matched[index + 1].second;
    int64_t bytes =
        most_between(measured, measured_at, measured_end) - most_between(expected_, planned_at, planned_end);
    // What is recomputed shows fewer samples than were recorded, unless the step has passed over it.
    const auto begin = events.begin() + planned_at, end = events.begin() + static_cast<std::ptrdiff_t>(planned_end);
    const bool is_sampled = std::none_of(begin, end, [](const StepEvent& event) { return event.index == kNone; });
    if (!is_sampled && std::none_of(begin + 1, end, has_name)) bytes = std::max<int64_t>(bytes, 0);
    // Events that other steps had, and this one has not, are corrected as well.
    for (size_t event = planned_at; event < planned_end; ++event) {
      Correction& correction = corrections_[event];
      if (event != planned_at && correction.count == 0) continue;
      correction.bytes[correction.count++ % correction.bytes.size()] = bytes;
    }
  }
}

uint64_t TriedChoice::unexplained_bytes(const MatchedEvents& matched, const Shortages& shortages,
                                        const StepLimits& limits, uint64_t margin_bytes) const {
  uint64_t most_bytes = 0;
  if (shortages.empty()) return most_bytes;
  const std::vector<uint64_t> demands = corrected_demands(), away = away_bytes();
  const uint64_t limit_bytes = limits_of(limits, choice_).limit_bytes;
  const uint64_t planned_bytes = limit_bytes - margin_bytes + choice_.plan.excess_bytes;
  for (const auto& [event, bytes] : shortages) {
    const auto after = std::upper_bound(matched.begin(), matched.end(), event,
                                        [](uint32_t left, const auto& right) { return left < right.second; });
    if (after == matched.begin()) continue;
    const uint32_t planned_at = std::prev(after)->first;
    const uint64_t demand_bytes = demands[planned_at];
    // There will be another plan, for a demand that this one did not know.
    const bool is_other = demand_bytes > choice_.record.events[planned_at].demand_bytes + limit_bytes / kLittlePart;
    if (is_other && demand_bytes > planned_bytes + away[planned_at]) continue;
    if (demand_bytes > limit_bytes + away[planned_at]) continue;  // no margin helps a plan that can't hold the limit
    most_bytes = std::max(most_bytes, bytes);
  }
  return most_bytes;
}

std::vector<uint64_t> TriedChoice::away_bytes() const {
  std::vector<uint64_t> away(choice_.record.events.size() + 1, 0);
  for (const Departure& departure : choice_.plan.departures) {
    const uint64_t bytes = choice_.record.storages[departure.storage].size_bytes;
    away[departure.release_at] += bytes;
    away[std::min(departure.load_at, departure.end_at)] -= bytes;
  }
  std::partial_sum(away.begin(), away.end(), away.begin());
  return away;
}

std::vector<uint64_t> TriedChoice::corrected_demands() const {
  std::vector<uint64_t> demands = expected_;
  int64_t change = 0;
  for (uint32_t event = 0; event < demands.size(); ++event) {
    if (corrections_[event].count > 0) change = corrections_[event].most();
    demands[event] = static_cast<uint64_t>(std::max<int64_t>(static_cast<int64_t>(demands[event]) + change, 0));
  }
  return demands;
}

bool TriedChoice::is_outdated(const StepLimits& limits) const {
  const std::vector<uint64_t> demands = corrected_demands(), away = away_bytes();
  const uint64_t limit_bytes = planned_limit(limits_of(limits, choice_), choice_.plan);
  const uint64_t most_bytes = limit_bytes + choice_.plan.excess_bytes;
  for (uint32_t event = 0; event < demands.size(); ++event)
    if (demands[event] > most_bytes + away[event]) return true;
  const std::vector<uint64_t> planned = demands_of(choice_.record);
  const int64_t planned_peak = most_between(planned, 0, planned.size());
  const int64_t peak = most_between(demands, 0, demands.size());
  const auto limit = static_cast<int64_t>(limit_bytes);
  return planned_peak > limit && peak + limit / static_cast<int64_t>(kUnusedPart) < planned_peak;
}

uint64_t TriedChoice::growth_bytes() const {
  const std::vector<uint64_t> demands = corrected_demands();
  const int64_t grown = most_between(demands, 0, demands.size()) - most_between(expected_, 0, expected_.size());
  return static_cast<uint64_t>(std::max<int64_t>(grown, 0));
}

void TriedChoice::plan_again(const StepLimits& limits) {
  const std::vector<uint64_t> demands = corrected_demands();
  for (size_t event = 0; event < demands.size(); ++event) choice_.record.events[event].demand_bytes = demands[event];
  policy::plan_again(choice_, limits);
}

StepRecord TriedChoice::with_demands(StepRecord step, const MatchedEvents& matched) const {
  const std::vector<uint64_t> demands = corrected_demands();
  for (size_t index = 0; index < matched.size(); ++index) {
    const auto& [planned_at, measured_at] = matched[index];
    const size_t planned_end = index + 1 == matched.size() ? demands.size() : matched[index + 1].first;
    uint64_t& demand = step.events[measured_at].demand_bytes;
    demand = std::max(demand, static_cast<uint64_t>(most_between(demands, planned_at, planned_end)));
  }
  return step;
}

StepRecord TriedChoice::with_growth(StepRecord whole) const {
  const std::vector<uint64_t> demands = corrected_demands();
  for (size_t event = 0; event < demands.size(); ++event) {
    uint64_t& demand = whole.events[event].demand_bytes;
    demand += demands[event] - std::min(demands[event], expected_[event]);
  }
  whole.storages = choice_.record.storages;
  return whole;
}

void TriedChoice::shorten(StepRecord& whole, const StepRecord& step, const MatchedEvents& matched) const {
  std::unordered_map<uint32_t, uint32_t> measured_at(matched.begin(), matched.end());
  const auto seconds_at = [&](uint32_t planned_at) {
    const auto found = measured_at.find(planned_at);
    return found == measured_at.end() ? std::numeric_limits<double>::quiet_NaN() : step.events[found->second].seconds;
  };
  std::vector<double> delays(whole.events.size(), 0);  // after an event, to run a block again
  for (const Block& block : choice_.recomputed) {
    const ModuleCall& call = whole.calls[block.call];
    const double seconds = seconds_at(call.returned_at) - seconds_at(call.entered_at);
    delays[block.backward_at] += seconds >= 0 ? seconds : block.forward_seconds;
  }
  const std::vector<StepEvent> before = whole.events;
  MatchedEvents marked;
  for (const auto& pair : matched)
    if (is_marked(before[pair.first].kind)) marked.push_back(pair);
  const auto move = [&](uint32_t begin, size_t end, double part) {
    for (size_t event = begin + size_t{1}; event <= end && event < before.size(); ++event)
      whole.events[event].seconds =
          whole.events[begin].seconds + part * (before[event].seconds - before[begin].seconds);
  };
  for (size_t index = 0; index + 1 < marked.size(); ++index) {
    const auto& [begin, measured_begin] = marked[index];
    const auto& [end, measured_end] = marked[index + 1];
    const double known = before[end].seconds - before[begin].seconds;
    double measured = step.events[measured_end].seconds - step.events[measured_begin].seconds;
    const double delay = std::accumulate(delays.begin() + begin, delays.begin() + end, 0.0);
    if (delay > 0) measured = std::max(measured - delay, delay);  // backward takes no less than forward
    move(begin, end, measured >= 0 && measured < known ? measured / known : 1);
  }
  if (!marked.empty()) move(marked.back().first, before.size(), 1);
}

}  // namespace ebbtide::policy
