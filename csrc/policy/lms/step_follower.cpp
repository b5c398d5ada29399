#include "policy/lms/step_follower.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace ebbtide::policy {
namespace {

constexpr size_t kMostKnownSteps = 4;
// A plan whose times or rates are off by more than this part is made anew.
constexpr double kTolerance = 0.25;

// splitmix64's mixing function.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

bool has_moved(double before, double now) { return !(std::abs(now - before) <= kTolerance * before); }

double duration(const StepRecord& record) {
  return record.events.empty() ? 0 : record.events.back().seconds - record.events.front().seconds;
}

// The highest demand from each turn to the next one.
std::vector<uint64_t> demands_of_turns(const StepRecord& record, const std::vector<uint32_t>& turns) {
  std::vector<uint64_t> demands(turns.size(), 0);
  for (size_t turn = 0; turn < turns.size(); ++turn) {
    const size_t end = turn + 1 < turns.size() ? turns[turn + 1] : record.events.size();
    for (size_t event = turns[turn]; event < end; ++event)
      demands[turn] = std::max(demands[turn], record.events[event].demand_bytes);
  }
  return demands;
}

// The bytes below the limit that the plan leaves from each turn to the next one.
std::vector<uint64_t> rooms_of_turns(const StepRecord& record, const std::vector<uint32_t>& turns, const StepPlan& plan,
                                     uint64_t limit_bytes) {
  std::vector<uint64_t> gone(record.events.size() + 1, 0), back(record.events.size() + 1, 0);
  for (const Departure& departure : plan.departures) {
    gone[departure.release_at] += record.sizes_bytes[departure.storage];
    back[std::min(departure.load_at, departure.end_at)] += record.sizes_bytes[departure.storage];
  }
  std::vector<uint64_t> rooms(turns.size(), UINT64_MAX);
  uint64_t away_bytes = 0;
  size_t turn = 0;
  for (size_t event = 0; event < record.events.size(); ++event) {
    away_bytes += gone[event] - back[event];
    if (turn + 1 < turns.size() && turns[turn + 1] == event) ++turn;
    const uint64_t demand_bytes = record.events[event].demand_bytes;
    const uint64_t held_bytes = demand_bytes - std::min(away_bytes, demand_bytes);
    rooms[turn] = std::min(rooms[turn], limit_bytes - std::min(held_bytes, limit_bytes));
  }
  return rooms;
}

}  // namespace

uint64_t StepFollower::saved(uint64_t size_bytes, uint64_t demand_bytes, double now) {
  clear_actions();
  const uint64_t storage = next_storage_++;
  if (!note(StepEventKind::kSaved, storage, demand_bytes, now)) return storage;
  record_.sizes_bytes.push_back(size_bytes);
  storages_.emplace_back();
  take_turn(mix(size_bytes));
  return storage;
}

void StepFollower::became_free(uint64_t storage) {
  clear_actions();
  if (!is_of_this_step(storage)) return;
  const uint64_t index = storage - first_storage_;
  Storage& freed = storages_[index];
  if (freed.is_free || freed.is_gone) return;
  if (!note(StepEventKind::kFree, storage, record_.events.back().demand_bytes, 0)) return;
  freed.is_free = true;
  if (followed_ == nullptr) return;
  if (freed.is_copy_due) act(StepActionKind::kCopyOut, static_cast<uint32_t>(index));
  if (freed.is_release_due) act(StepActionKind::kRelease, static_cast<uint32_t>(index));
  advance_without_turn();
}

void StepFollower::wanted(uint64_t storage, uint64_t demand_bytes, double now) {
  clear_actions();
  if (!is_of_this_step(storage)) return;
  const uint64_t index = storage - first_storage_;
  if (storages_[index].is_gone || !note(StepEventKind::kWanted, storage, demand_bytes, now)) return;
  take_turn(~mix(index));
  storages_[index] = {};
}

void StepFollower::dropped(uint64_t storage) {
  clear_actions();
  if (!is_of_this_step(storage)) return;
  const uint64_t index = storage - first_storage_;
  if (storages_[index].is_gone) return;
  // If something else still refers to it, its memory stays for now.
  const uint64_t freed_bytes = storages_[index].is_free ? record_.sizes_bytes[index] : 0;
  const uint64_t before_bytes = record_.events.back().demand_bytes;
  if (!note(StepEventKind::kDropped, storage, before_bytes - std::min(before_bytes, freed_bytes), 0)) return;
  storages_[index] = {.is_gone = true};
  if (followed_ != nullptr) advance_without_turn();
}

void StepFollower::missed(uint64_t demand_bytes) {
  clear_actions();
  if (record_.events.empty()) return;
  uint64_t& demand = record_.events.back().demand_bytes;
  demand = std::max(demand, demand_bytes);
}

void StepFollower::end_step(const StepLimits& limits) {
  clear_actions();
  if (is_recorded_ && !record_.events.empty()) {
    const auto known = std::find_if(known_.begin(), known_.end(), [&](const KnownStep& step) {
      return step.fingerprints.size() == fingerprints_.size() && step.fingerprints.back() == fingerprints_.back();
    });
    if (known == known_.end()) {
      if (known_.size() == kMostKnownSteps) known_.pop_back();
      make_plan_for(known_.emplace_front(), limits);
    } else {
      known_.splice(known_.begin(), known_, known);
      if (is_outdated(*known, limits)) {
        keep_demands(*known);
        make_plan_for(*known, limits);
      }
    }
  }
  followed_ = nullptr;
  first_storage_ = next_storage_;
  is_recorded_ = true;
  record_ = {};
  turns_.clear();
  fingerprints_.clear();
  storages_.clear();
}

void StepFollower::clear_actions() {
  actions_.copies_out.clear();
  actions_.releases.clear();
  actions_.loads.clear();
}

// Whether the event was recorded. The storage is one of this step, or about to be.
bool StepFollower::note(StepEventKind kind, uint64_t storage, uint64_t demand_bytes, double now) {
  if (record_.events.size() == kMostStepEvents) is_recorded_ = false;
  if (!is_recorded_) {
    followed_ = nullptr;
    return false;
  }
  const bool has_time = kind == StepEventKind::kSaved || kind == StepEventKind::kWanted;
  if (record_.events.empty()) began_ = now;
  const double seconds = has_time ? now - began_ : record_.events.back().seconds;
  record_.events.push_back({kind, static_cast<uint32_t>(storage - first_storage_), demand_bytes, seconds});
  return true;
}

void StepFollower::take_turn(uint64_t what) {
  turns_.push_back(static_cast<uint32_t>(record_.events.size() - 1));
  fingerprints_.push_back(mix(what + (fingerprints_.empty() ? 0 : fingerprints_.back())));
  const size_t turn = fingerprints_.size() - 1;
  const auto is_equal = [&](const KnownStep& known) {
    return turn < known.fingerprints.size() && known.fingerprints[turn] == fingerprints_[turn];
  };
  if (followed_ != nullptr && is_equal(*followed_)) return advance_to(followed_->turns[turn]);
  followed_ = nullptr;
  const auto found = std::find_if(known_.begin(), known_.end(), is_equal);
  if (found == known_.end()) return;
  followed_ = &*found;
  join(followed_->turns[turn]);
}

// The actions after the next event of the plan if equal steps need not have it.
void StepFollower::advance_without_turn() {
  const std::vector<StepEvent>& events = followed_->record.events;
  if (next_event_ == events.size()) return;
  const StepEventKind kind = events[next_event_].kind;
  if (kind == StepEventKind::kFree || kind == StepEventKind::kDropped) advance_to(next_event_);
}

// Does what the plan says for all events up to this one.
void StepFollower::advance_to(uint32_t event) {
  const StepPlan& plan = followed_->plan;
  for (; next_action_ < plan.actions.size() && plan.actions[next_action_].event <= event; ++next_action_) {
    const StepAction& action = plan.actions[next_action_];
    act(action.kind, plan.departures[action.departure].storage);
  }
  next_event_ = event + 1;
}

// Begins to follow a plan at this event: makes up for what should be under way.
void StepFollower::join(uint32_t event) {
  for (Storage& storage : storages_) storage.is_copy_due = storage.is_release_due = false;
  const StepPlan& plan = followed_->plan;
  for (const Departure& departure : plan.departures) {
    if (departure.copy_at > event || departure.end_at <= event) continue;
    act(StepActionKind::kCopyOut, departure.storage);
    if (departure.release_at <= event) act(StepActionKind::kRelease, departure.storage);
    if (departure.load_at <= event) act(StepActionKind::kLoad, departure.storage);
  }
  const auto is_done = [&](const StepAction& action) { return action.event <= event; };
  next_action_ = static_cast<size_t>(std::partition_point(plan.actions.begin(), plan.actions.end(), is_done) -
                                     plan.actions.begin());
  next_event_ = event + 1;
}

void StepFollower::act(StepActionKind kind, uint32_t index) {
  Storage& storage = storages_[index];
  const uint64_t number = first_storage_ + index;
  if (kind == StepActionKind::kLoad) {
    storage.is_copy_due = storage.is_release_due = false;
    // In a step that frees it later than the recorded one, its release may be due only now that it has to be back.
    if (storage.is_released && std::erase(actions_.releases, number) == 0) actions_.loads.push_back(number);
    storage.is_released = storage.is_copied = false;
    return;
  }
  const bool is_copy = kind == StepActionKind::kCopyOut;
  (is_copy ? storage.is_copy_due : storage.is_release_due) = !storage.is_free;
  bool& is_done = is_copy ? storage.is_copied : storage.is_released;
  if (!storage.is_free || is_done) return;
  is_done = true;
  (is_copy ? actions_.copies_out : actions_.releases).push_back(number);
}

// Takes this step's record.
void StepFollower::make_plan_for(KnownStep& known, const StepLimits& limits) {
  known.record = std::move(record_);
  known.turns = std::move(turns_);
  known.fingerprints = std::move(fingerprints_);
  known.limits = limits;
  known.plan = make_plan(known.record, limits);
  ++plans_made_;
}

// A demand that was met thanks to the plan shows no more, but it is still there.
void StepFollower::keep_demands(const KnownStep& known) {
  const std::vector<uint64_t> before = demands_of_turns(known.record, known.turns);
  for (size_t turn = 0; turn < turns_.size(); ++turn) {
    uint64_t& demand = record_.events[turns_[turn]].demand_bytes;
    demand = std::max(demand, before[turn]);
  }
}

// Whether the plan of an equal step no longer suits this one.
bool StepFollower::is_outdated(const KnownStep& known, const StepLimits& limits) const {
  if (limits.limit_bytes != known.limits.limit_bytes) return true;
  const bool has_copies = !known.plan.departures.empty();
  if (has_copies && (has_moved(known.limits.out_bytes_per_second, limits.out_bytes_per_second) ||
                     has_moved(known.limits.in_bytes_per_second, limits.in_bytes_per_second) ||
                     has_moved(duration(known.record), duration(record_))))
    return true;
  const std::vector<uint64_t> before = demands_of_turns(known.record, known.turns);
  const std::vector<uint64_t> now = demands_of_turns(record_, turns_);
  const std::vector<uint64_t> rooms = rooms_of_turns(known.record, known.turns, known.plan, limits.limit_bytes);
  for (size_t turn = 0; turn < now.size(); ++turn)
    if (now[turn] > before[turn] && now[turn] - before[turn] > rooms[turn]) return true;
  return false;
}

}  // namespace ebbtide::policy
