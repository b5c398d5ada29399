#include "policy/lms/step_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include "policy/lms/range_minimum.h"

namespace ebbtide::policy {
namespace {

// The links are planned for as if each copy took this much longer. Copies out beyond what is needed in time fill host
// memory too early; a load that is early costs only room that nothing else needs.
constexpr double kOutMargin = 1.25;
constexpr double kInMargin = 2.0;
// Times of events say when the program asked, which a device that lags behind does not feel. So a load begins at least
// so many events ahead, if memory allows.
constexpr uint32_t kLeastEventsAhead = 8;
// Demands and limits beyond this make no sense. Sums with what a step saves do not overflow.
constexpr uint64_t kMostBytes = uint64_t{1} << 61;

class Planner {
 public:
  Planner(const StepRecord& record, const StepLimits& limits)
      : record_(record),
        limits_(limits),
        limit_bytes_(static_cast<int64_t>(std::min(limits.limit_bytes, kMostBytes))),
        event_count_(static_cast<uint32_t>(record.events.size())) {}

  StepPlan plan() {
    const uint64_t most_bytes = std::max(limits_.limit_bytes, limits_.unmoved_bytes);
    const auto exceeds = [&](const StepEvent& event) { return event.demand_bytes > most_bytes; };
    if (std::none_of(record_.events.begin(), record_.events.end(), exceeds)) return {};
    find_gaps();
    choose();
    settle();
    std::vector<Departure>& departures = plan_.departures;
    schedule_loads(departures);
    schedule_copies(departures);
    list_actions();
    return std::move(plan_);
  }

 private:
  int64_t size_of(uint32_t storage) const {
    return static_cast<int64_t>(std::min(record_.storages[storage].size_bytes, kMostStorageBytes));
  }
  int64_t demand_at(uint32_t event) const {
    return static_cast<int64_t>(std::min(record_.events[event].demand_bytes, kMostBytes));
  }

  // Finds when each storage may be away. gaps_ are in the order of their beginnings.
  void find_gaps() {
    std::vector<uint32_t> open(record_.storages.size(), kNone);
    std::vector<bool> is_gone(record_.storages.size(), false);
    gap_begins_.assign(event_count_, kNone);
    gap_ends_.assign(event_count_, kNone);
    seconds_.resize(event_count_);
    happened_.resize(event_count_);
    double latest = 0;
    for (uint32_t index = 0; index < event_count_; ++index) {
      const StepEvent& event = record_.events[index];
      happened_[index] = event.index != kNone || index == 0 ? index : happened_[index - 1];
      if (std::isfinite(event.seconds)) latest = index == 0 ? event.seconds : std::max(latest, event.seconds);
      seconds_[index] = latest;
      if (is_of_call(event.kind) || event.index >= open.size() || is_gone[event.index]) continue;
      uint32_t& gap = open[event.index];
      const RecordedStorage& storage = record_.storages[event.index];
      const bool may_leave = storage.size_bytes > 0 && !storage.stays;
      if (event.kind == StepEventKind::kFree && gap == kNone && may_leave) {
        gap = gap_begins_[index] = static_cast<uint32_t>(gaps_.size());
        gaps_.push_back({.storage = event.index, .free_at = index, .release_at = kNoEvent, .end_at = event_count_});
      } else if (event.kind == StepEventKind::kWanted || event.kind == StepEventKind::kDropped) {
        is_gone[event.index] = event.kind == StepEventKind::kDropped;
        if (gap == kNone) continue;
        gaps_[gap].end_at = index;
        gap_ends_[index] = std::exchange(gap, kNone);
      }
    }
  }

  // Nobody sees an event that does not happen, so what it should begin begins before it.
  uint32_t seen_by(uint32_t event) const { return event < event_count_ ? happened_[event] : event; }

  bool is_wanted_at_end(const Departure& gap) const {
    return gap.end_at < event_count_ && record_.events[gap.end_at].kind == StepEventKind::kWanted;
  }

  // Releases what is wanted farthest in the future whenever the demand does not fit.
  void choose() {
    using NextUse = std::pair<uint64_t, uint32_t>;  // and the gap
    std::priority_queue<NextUse> candidates;
    int64_t away_bytes = 0;
    for (uint32_t event = 0; event < event_count_; ++event) {
      if (const uint32_t ended = gap_ends_[event]; ended != kNone && gaps_[ended].release_at != kNoEvent)
        away_bytes -= size_of(gaps_[ended].storage);
      if (const uint32_t begun = gap_begins_[event]; begun != kNone) {
        const uint64_t end = gaps_[begun].end_at;
        candidates.emplace(is_wanted_at_end(gaps_[begun]) ? end : end + event_count_, begun);
      }
      while (demand_at(event) - away_bytes > limit_bytes_ && !candidates.empty()) {
        Departure& gap = gaps_[candidates.top().second];
        candidates.pop();
        if (gap.end_at <= event) continue;
        gap.release_at = std::max(seen_by(event), gap.free_at);
        away_bytes += size_of(gap.storage);
      }
      plan_.excess_bytes =
          std::max(plan_.excess_bytes,
                   static_cast<uint64_t>(std::max<int64_t>(demand_at(event) - away_bytes - limit_bytes_, 0)));
    }
  }

  // A large storage may have made earlier ones unnecessary, for all the time or at first.
  void settle() {
    std::vector<Departure> chosen;
    for (const Departure& gap : gaps_)
      if (gap.release_at != kNoEvent) chosen.push_back(gap);
    std::sort(chosen.begin(), chosen.end(),
              [](const Departure& left, const Departure& right) { return left.end_at < right.end_at; });
    std::vector<int64_t> changes(event_count_ + size_t{1}, 0);
    for (const Departure& departure : chosen) {
      changes[departure.release_at] += size_of(departure.storage);
      changes[departure.end_at] -= size_of(departure.storage);
    }
    std::vector<int64_t> spare(event_count_);
    int64_t away_bytes = 0;
    for (uint32_t event = 0; event < event_count_; ++event) {
      away_bytes += changes[event];
      spare[event] = limit_bytes_ - demand_at(event) + away_bytes;
    }
    spare_ = RangeMinimum(spare);
    for (Departure& departure : chosen) {
      const int64_t size_bytes = size_of(departure.storage);
      size_t needed_at = spare_.first_below(departure.release_at, departure.end_at, size_bytes);
      if (needed_at < departure.end_at) needed_at = std::max(seen_by(needed_at), departure.release_at);
      spare_.add(departure.release_at, needed_at, -size_bytes);
      departure.release_at = static_cast<uint32_t>(needed_at);
      if (needed_at < departure.end_at) plan_.departures.push_back(departure);
    }
  }

  // The last event that is no later, or the first one.
  uint32_t last_event_until(double seconds) const {
    const auto after = std::upper_bound(seconds_.begin(), seconds_.end(), seconds);
    return after == seconds_.begin() ? 0 : static_cast<uint32_t>(after - seconds_.begin()) - 1;
  }

  void schedule_loads(std::vector<Departure>& departures) {
    double link_until = std::numeric_limits<double>::infinity();
    for (size_t index = departures.size(); index-- > 0;) {
      Departure& departure = departures[index];
      if (!is_wanted_at_end(departure)) continue;
      link_until =
          std::min(link_until, seconds_[departure.end_at]) -
          kInMargin * copy_seconds(record_.storages[departure.storage].size_bytes, limits_.in_bytes_per_second);
      uint32_t near = departure.end_at;
      for (uint32_t ahead = 0; ahead < kLeastEventsAhead && near > 0; ++ahead) near = seen_by(near - 1);
      departure.load_at = std::min(seen_by(last_event_until(link_until)), near);
    }
    uint32_t earlier_load = 0;
    for (Departure& departure : departures) {
      if (departure.load_at == kNoEvent) continue;
      const int64_t size_bytes = size_of(departure.storage);
      const uint32_t soonest = std::max({departure.load_at, departure.release_at + 1, earlier_load});
      const uint32_t wished = std::min(soonest, departure.end_at);
      departure.load_at = static_cast<uint32_t>(spare_.after_last_below(wished, departure.end_at, size_bytes));
      while (departure.load_at < departure.end_at && seen_by(departure.load_at) != departure.load_at)
        ++departure.load_at;
      spare_.add(departure.load_at, departure.end_at, -size_bytes);
      earlier_load = departure.load_at;
    }
  }

  void schedule_copies(std::vector<Departure>& departures) {
    by_release_.resize(departures.size());
    for (uint32_t index = 0; index < by_release_.size(); ++index) by_release_[index] = index;
    std::sort(by_release_.begin(), by_release_.end(), [&](uint32_t left, uint32_t right) {
      return std::pair(departures[left].release_at, departures[left].free_at) <
             std::pair(departures[right].release_at, departures[right].free_at);
    });
    double link_until = std::numeric_limits<double>::infinity();
    for (size_t index = by_release_.size(); index-- > 0;) {
      Departure& departure = departures[by_release_[index]];
      link_until =
          std::min(link_until, seconds_[departure.release_at]) -
          kOutMargin * copy_seconds(record_.storages[departure.storage].size_bytes, limits_.out_bytes_per_second);
      departure.copy_at = std::clamp(seen_by(last_event_until(link_until)), departure.free_at, departure.release_at);
    }
  }

  void list_actions() {
    for (const uint32_t index : by_release_) {
      plan_.actions.push_back({plan_.departures[index].copy_at, StepActionKind::kCopyOut, index});
      plan_.actions.push_back({plan_.departures[index].release_at, StepActionKind::kRelease, index});
    }
    for (uint32_t index = 0; index < plan_.departures.size(); ++index)
      if (plan_.departures[index].load_at != kNoEvent)
        plan_.actions.push_back({plan_.departures[index].load_at, StepActionKind::kLoad, index});
    std::stable_sort(plan_.actions.begin(), plan_.actions.end(), [](const StepAction& left, const StepAction& right) {
      return std::pair(left.event, left.kind) < std::pair(right.event, right.kind);
    });
  }

  const StepRecord& record_;
  const StepLimits& limits_;
  const int64_t limit_bytes_;
  const uint32_t event_count_;
  std::vector<double> seconds_;     // of the events, never backwards
  std::vector<uint32_t> happened_;  // of each event, the last one until it that happens
  std::vector<Departure> gaps_;
  std::vector<uint32_t> gap_begins_, gap_ends_;  // for each event the gap that it begins or ends, or kNone
  RangeMinimum spare_{{}};                       // for each event the bytes below the limit
  std::vector<uint32_t> by_release_;
  StepPlan plan_;
};

}  // namespace

double copy_seconds(uint64_t size_bytes, double bytes_per_second) {
  const double seconds = static_cast<double>(size_bytes) / bytes_per_second;
  return seconds >= 0 ? seconds : std::numeric_limits<double>::infinity();
}

uint64_t planned_limit(const StepLimits& limits, const StepPlan& plan) {
  return plan.evicts_nothing() ? std::max(limits.limit_bytes, limits.unmoved_bytes) : limits.limit_bytes;
}

StepPlan make_plan(const StepRecord& record, const StepLimits& limits) {
  if (record.events.size() > kMostStepEvents) return {};
  return Planner(record, limits).plan();
}

}  // namespace ebbtide::policy
