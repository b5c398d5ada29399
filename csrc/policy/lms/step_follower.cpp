#include "policy/lms/step_follower.h"

#include <algorithm>
#include <utility>

namespace ebbtide::policy {
namespace {

constexpr size_t kMostKnownSteps = 8;
constexpr uint64_t kLateSteps = 16;
// Where no more of them find room, a step is taken for another one if its first storage is no more than twice, or half,
// as large.
constexpr uint32_t kAlikeDistance = 4;

// The innermost call around both.
uint32_t common_call(const std::vector<ModuleCall>& calls, uint32_t one, uint32_t other) {
  while (one != other) {
    if (one == kNone || other == kNone) return kNone;
    uint32_t& later = one > other ? one : other;
    later = calls[later].parent;
  }
  return one;
}

}  // namespace

uint32_t StepFollower::entered(const NewCall& made, uint64_t demand_bytes, double now) {
  clear_actions();
  const auto call = static_cast<uint32_t>(record_.calls.size());
  if (!note(StepEventKind::kEntered, call, demand_bytes, now)) return kNone;
  record_.calls.push_back({.key = made.key,
                           .name = made.name,
                           .module = made.module,
                           .kind = made.kind,
                           .parent = made.parent < call ? made.parent : kNone,
                           .entered_at = event_count() - 1,
                           .input_bytes = std::min(made.input_bytes, kMostStorageBytes)});
  reach(StepEventKind::kEntered, made.key, 0);
  return call;
}

void StepFollower::returned(uint32_t call, uint64_t demand_bytes, double now) {
  clear_actions();
  if (call >= record_.calls.size() || !note(StepEventKind::kReturned, call, demand_bytes, now)) return;
  record_.calls[call].returned_at = event_count() - 1;
  reach(StepEventKind::kReturned, record_.calls[call].key, 0);
}

uint64_t StepFollower::saved(const NewStorage& given, uint64_t demand_bytes, double now) {
  clear_actions();
  const uint64_t storage = next_storage_++;
  const auto index = static_cast<uint32_t>(record_.storages.size());
  if (!note(StepEventKind::kSaved, index, demand_bytes, now)) return storage;
  const auto known_call = [&](uint32_t call) { return call < record_.calls.size() ? call : kNone; };
  const uint64_t size_bytes = std::min(given.size_bytes, kMostStorageBytes);
  record_.storages.push_back({size_bytes, given.key, known_call(given.call), known_call(given.input_of), given.stays});
  if (known_call(given.call) != kNone) record_.saves.push_back({index, given.call});
  storages_.emplace_back();
  if (index == 0) {
    // Calls that came before it may have begun to follow a step with other sizes.
    const RecordedStorage& first = record_.storages.front();
    const uint32_t most = followed_ == nullptr ? kNone : followed_->distance(first);
    if (KnownStep* const best = nearest(first, most); best != nullptr) follow(*best);
  }
  reach(StepEventKind::kSaved, given.key, 0);
  bind(storage, given.key);
  return storage;
}

void StepFollower::saved_again(uint64_t storage, const NewStorage& named) {
  clear_actions();
  if (!is_of_this_step(storage)) return;
  const auto index = static_cast<uint32_t>(storage - first_storage_);
  RecordedStorage& saved = record_.storages[index];
  const bool is_known = named.call < record_.calls.size();
  saved.stays |= named.stays;
  saved.call = common_call(record_.calls, saved.call, is_known ? named.call : kNone);
  if (is_known && record_.saves.size() < kMostStepEvents) record_.saves.push_back({index, named.call});
  bind(storage, named.key);
}

void StepFollower::saved_input(uint32_t call, uint64_t size_bytes) {
  if (call < record_.calls.size()) record_.calls[call].saved_input_bytes += size_bytes;
}

void StepFollower::became_free(uint64_t storage) {
  clear_actions();
  if (!is_of_this_step(storage)) return;
  const auto index = static_cast<uint32_t>(storage - first_storage_);
  Storage& freed = storages_[index];
  if (freed.is_free || freed.is_gone) return;
  if (!note(StepEventKind::kFree, index, record_.events.back().demand_bytes, 0)) return;
  freed.is_free = true;
  if (followed_ == nullptr) return;
  do_due(storage);
  advance_without_anchor();
}

void StepFollower::wanted(uint64_t storage, uint64_t demand_bytes, double now) {
  clear_actions();
  if (!is_of_this_step(storage)) return;
  const auto index = static_cast<uint32_t>(storage - first_storage_);
  Storage& read = storages_[index];
  if (read.is_gone || !note(StepEventKind::kWanted, index, demand_bytes, now)) return;
  reach(StepEventKind::kWanted, record_.storages[index].key, read.wants++);
  std::erase(actions_.copies_out, storage);
  std::erase(actions_.releases, storage);
  read.is_free = read.is_copied = read.is_released = false;
}

void StepFollower::dropped(uint64_t storage) {
  clear_actions();
  if (!is_of_this_step(storage)) return;
  const auto index = static_cast<uint32_t>(storage - first_storage_);
  Storage& gone = storages_[index];
  if (gone.is_gone) return;
  // If something else still refers to it, its memory stays for now.
  const uint64_t freed_bytes = gone.is_free ? record_.storages[index].size_bytes : 0;
  const uint64_t before_bytes = record_.events.back().demand_bytes;
  if (!note(StepEventKind::kDropped, index, before_bytes - std::min(before_bytes, freed_bytes), 0)) return;
  if (gone.planned != kNone) due_[gone.planned] = {};
  gone = {.is_gone = true};
  if (followed_ != nullptr) advance_without_anchor();
}

void StepFollower::missed(uint64_t demand_bytes) {
  clear_actions();
  if (record_.events.empty()) return;
  uint64_t& demand = record_.events.back().demand_bytes;
  demand = std::max(demand, std::min(demand_bytes, kMostDemandBytes));
}

void StepFollower::fell_short(uint64_t missing_bytes, uint64_t useless_bytes) {
  // What comes when all that was saved is gone, such as an optimizer's step, is not for plans.
  const auto is_gone = [](const Storage& storage) { return storage.is_gone; };
  if (std::all_of(storages_.begin(), storages_.end(), is_gone)) return;
  if (followed_ != nullptr) shortages_.emplace_back(event_count() - 1, missing_bytes);
  most_useless_bytes_ = std::max(most_useless_bytes_, useless_bytes);
}

void StepFollower::set_times(const std::vector<std::pair<uint32_t, double>>& seconds_of_events) {
  policy::set_times(record_, seconds_of_events);
}

void StepFollower::end_step(const StepRules& rules) {
  clear_actions();
  bool must_give_back = false;
  if (is_recorded_ && !record_.storages.empty()) {
    const auto is_it = [like = known_like_this()](const Known& each) { return &each.step == like; };
    if (const auto known = std::find_if(known_.begin(), known_.end(), is_it); known != known_.end()) {
      if (followed_ == &known->step) {
        plans_made_ += known->step.note(std::move(record_), matched_, shortages_, rules) ? 1 : 0;
        must_give_back = known->step.must_give_back();
        known->ended = step_;
      }
      known_.splice(known_.begin(), known_, known);
      if (known_.front().step.is_another_program()) known_.pop_front();  // the next step is recorded
    } else if (!rules.was_disturbed) {
      if (known_.size() == kMostKnownSteps) known_.pop_back();
      known_.push_front({KnownStep(std::move(record_), rules, most_useless_bytes_), step_});
      ++plans_made_;
    }
  }
  abandon_step();
  must_give_back_ = must_give_back;
}

// The known step for which this one counts now that it ends; null if it is another one. One that recomputed does not
// show all that it saves, so that it cannot be recorded.
KnownStep* StepFollower::known_like_this() {
  const RecordedStorage& first = record_.storages.front();
  if (followed_ != nullptr && (followed_->distance(first) == 0 || followed_->current().has_recomputed(record_)))
    return followed_;
  return nearest(first, known_.size() == kMostKnownSteps ? kAlikeDistance + 1 : 1);
}

void StepFollower::choose_again(const StepRules& rules) {
  if (followed_ == nullptr || !record_.storages.empty()) return;
  KnownStep& known = *std::exchange(followed_, nullptr);
  known.choose(rules);
  ++plans_made_;
  follow(known);
}

void StepFollower::abandon_step() {
  clear_actions();
  must_give_back_ = false;
  followed_ = nullptr;
  if (std::exchange(is_outdated_, false)) known_.clear();
  ++step_;
  first_storage_ = next_storage_;
  is_recorded_ = true;
  record_ = {};
  storages_.clear();
  due_.clear();
  matched_.clear();
  shortages_.clear();
  most_useless_bytes_ = 0;
}

void StepFollower::forget_known() {
  is_outdated_ = followed_ != nullptr || !record_.events.empty();
  if (!is_outdated_) known_.clear();
}

uint64_t StepFollower::state_bytes() const {
  uint64_t most = 0;
  for (const auto& [known, ended] : known_)
    if (ended >= states_known_from_ && ended + kLateSteps > step_)
      most = std::max(most, known.current().choice().state_bytes);
  return most;
}

bool StepFollower::has_plan_for(uint64_t storage) const {
  return is_of_this_step(storage) && storages_[storage - first_storage_].planned != kNone;
}

void StepFollower::clear_actions() {
  actions_.copies_out.clear();
  actions_.releases.clear();
  actions_.loads.clear();
}

// The known step that is the most like one that opens so: with the least distance below most_distance.
KnownStep* StepFollower::nearest(const RecordedStorage& first, uint32_t most_distance) {
  KnownStep* best = nullptr;
  for (auto& [known, ended] : known_) {
    const uint32_t distance = known.distance(first);
    if (distance >= most_distance) continue;
    best = &known;
    most_distance = distance;
  }
  return best;
}

// Whether the event was recorded. The storage or the call is one of this step, or about to be.
bool StepFollower::note(StepEventKind kind, uint32_t index, uint64_t demand_bytes, double now) {
  if (record_.events.size() == kMostStepEvents) is_recorded_ = false;
  if (!is_recorded_) {
    followed_ = nullptr;
    return false;
  }
  if (record_.events.empty()) began_ = now;
  const double seconds = has_anchor(kind) ? now - began_ : record_.events.back().seconds;
  record_.events.push_back({kind, index, std::min(demand_bytes, kMostDemandBytes), seconds});
  return true;
}

// The step has come to an event that may be in the plan.
void StepFollower::reach(StepEventKind kind, uint64_t key, uint32_t occurrence) {
  const uint64_t name = anchor(kind, key, occurrence);
  if (followed_ == nullptr && record_.storages.empty()) {
    const auto begins_so = [&](const Known& known) { return known.step.current().event_of(name) != kNone; };
    if (const auto found = std::find_if(known_.begin(), known_.end(), begins_so); found != known_.end())
      follow(found->step);
  }
  if (followed_ == nullptr) return;
  const uint32_t event = followed_->current().event_of(name);
  if (event == kNone || (event < next_event_ && !matched_.empty())) return;
  matched_.emplace_back(event, event_count() - 1);
  advance_to(event);
}

void StepFollower::follow(KnownStep& known) {
  if (followed_ == &known) return;
  followed_ = &known;
  matched_.clear();
  next_event_ = 0;
  next_action_ = 0;
  due_.assign(known.current().choice().record.storages.size(), {});
}

// The storage has this name. What the plan has asked of it is done now, or as soon as it is free.
void StepFollower::bind(uint64_t storage, uint64_t key) {
  Storage& bound = storages_[storage - first_storage_];
  if (followed_ == nullptr || bound.planned != kNone || bound.is_gone) return;
  const uint32_t planned = followed_->current().storage_of(key);
  if (planned == kNone || due_[planned].number != UINT64_MAX) return;
  bound.planned = planned;
  due_[planned].number = storage;
}

void StepFollower::do_due(uint64_t storage) {
  const uint32_t planned = storages_[storage - first_storage_].planned;
  if (planned == kNone) return;
  if (due_[planned].is_copy_due) act(StepActionKind::kCopyOut, planned);
  if (due_[planned].is_release_due) act(StepActionKind::kRelease, planned);
}

// The actions of the next event of the plan that happens, if that has no name.
void StepFollower::advance_without_anchor() {
  const std::vector<StepEvent>& events = followed_->current().choice().record.events;
  uint32_t next = next_event_;
  while (next < events.size() && events[next].index == kNone) ++next;
  if (next < events.size() && !has_anchor(events[next].kind)) advance_to(next);
}

// Does what the plan says for all events up to this one.
void StepFollower::advance_to(uint32_t event) {
  const StepPlan& plan = followed_->current().plan();
  for (; next_action_ < plan.actions.size() && plan.actions[next_action_].event <= event; ++next_action_) {
    const StepAction& action = plan.actions[next_action_];
    act(action.kind, plan.departures[action.departure].storage);
  }
  next_event_ = event + 1;
}

void StepFollower::act(StepActionKind kind, uint32_t planned) {
  Due& due = due_[planned];
  if (kind == StepActionKind::kLoad) due.is_copy_due = due.is_release_due = false;
  if (kind == StepActionKind::kCopyOut) due.is_copy_due = true;
  if (kind == StepActionKind::kRelease) due.is_release_due = true;
  if (due.number == UINT64_MAX) return;
  Storage& storage = storages_[due.number - first_storage_];
  if (kind == StepActionKind::kLoad) {
    // In a step that frees it later than the recorded one, it may have left only now that it has to be back.
    if (storage.is_released && std::erase(actions_.releases, due.number) == 0) actions_.loads.push_back(due.number);
    std::erase(actions_.copies_out, due.number);
    storage.is_released = storage.is_copied = false;
    return;
  }
  if (!storage.is_free) return;
  due.is_copy_due = false;
  const bool is_loaded_now =
      std::find(actions_.loads.begin(), actions_.loads.end(), due.number) != actions_.loads.end();
  if (is_loaded_now && kind == StepActionKind::kCopyOut) return;
  if (is_loaded_now) {
    // The step has passed over what it was wanted for, so it stays away.
    std::erase(actions_.loads, due.number);
    storage.is_copied = storage.is_released = true;
  }
  if (!std::exchange(storage.is_copied, true)) actions_.copies_out.push_back(due.number);
  if (kind == StepActionKind::kCopyOut) return;
  due.is_release_due = false;
  if (!std::exchange(storage.is_released, true)) actions_.releases.push_back(due.number);
}

}  // namespace ebbtide::policy
