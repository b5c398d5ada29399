// What the ledger knows of training steps, and what it does of their plans.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "torch/lms/device_side.h"
#include "torch/lms/gil.h"
#include "torch/lms/ledger.h"
#include "torch/lms/optimizer_states.h"
#include "torch/lms/packed.h"
#include "torch/lms/weights.h"

namespace ebbtide::lms {
namespace {

// A rate is that of the latest copies, as many as have these bytes at most.
constexpr double kRememberedBytes = 4e9;
// How often a storage is looked at before it counts as one that stays in use.
constexpr int kLooks = 1024;
// Of storages that no plan knows, so many at most come back ahead of need at once.
constexpr size_t kMostAhead = 8;
constexpr uint64_t kMostAheadBytes = uint64_t{512} << 20;
// Of the limit, what free memory in pieces may cost: a part in so many.
constexpr uint64_t kPiecesPart = 16;

}  // namespace

// A bus of PCIe 4 until copies have shown another rate.
double Ledger::Rate::bytes_per_second() const { return seconds > 0 ? bytes / seconds : 20e9; }

void Ledger::Rate::add(const Rate& other) {
  bytes += other.bytes;
  seconds += other.seconds;
  if (bytes < kRememberedBytes) return;
  bytes /= 2;
  seconds /= 2;
}

// Without the time that copies cost: a plan that hides them shall not count on it.
double Ledger::now() const {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_start).count() - statistics_.waited_seconds;
}

bool Ledger::has_ended(const Steps& steps) {
  return steps.storages.empty() && (steps.was_wanted || steps.follower.has_saved());
}

Ledger::Steps& Ledger::steps_now(c10::Device device, const DeviceSide::Usage& usage) {
  Steps& steps = steps_[device.index()];
  if (has_ended(steps)) end_step(device, steps, usage);
  return steps;
}

// Before a step that has marks is ended: the device has come to them then. Neither the lock nor the GIL is held
// meanwhile. Only steps whose times are wanted have any.
void Ledger::await_marks(c10::Device device) {
  std::optional<TimeMark> last;
  {
    const Lock lock(mutex_);
    const Steps& steps = steps_[device.index()];
    if (!steps.marks.empty() && has_ended(steps)) last = steps.marks.back().second;
  }
  if (!last) return;
  const GilReleased without_gil;
  try {
    last->wait();
  } catch (const std::exception&) {
    // set_times() finds that out, too.
  }
}

// Everything that the step saved is gone. If nothing was wanted, it was a forward without backward, of which nothing is
// learned.
void Ledger::end_step(c10::Device device, Steps& steps, const DeviceSide::Usage& usage) {
  if (steps.was_wanted) {
    if (may_rest_) rest_.step_ended(did_fit(steps));
    const bool had_update = steps_since_update_++ == 0;
    note_elsewhere(device, steps);
    set_times(steps);
    const uint64_t plans_before = steps.follower.plans_made();
    policy::StepRules rules = rules_for(device, steps);
    rules.demand_bytes = demand_bytes(usage.bytes);
    rules.had_update = had_update || !has_optimizers_;
    rules.least_limit_bytes = steps.least_limit_bytes;
    steps.follower.end_step(rules);
    const bool is_new = steps.is_choice_new || steps.follower.plans_made() != plans_before;
    steps.is_choice_new = is_new && steps.follower.latest() != nullptr;
  } else {
    steps.follower.abandon_step();
  }
  begin_anew(steps);
  steps.flushes = usage.flushes;  // what flushed since the step's end, as in an optimizer's step, is not the next one's
}

void Ledger::begin_anew(Steps& steps) const {
  steps.due = {};
  steps.postponed.clear();
  steps.calls.clear();
  steps.marks.clear();
  steps.was_wanted = steps.was_disturbed = steps.was_short = steps.has_flushed = false;
  steps.least_limit_bytes = UINT64_MAX;
  steps.evicted_before_bytes = ever_evicted_bytes_;
}

// Whether nothing had to leave or to be computed again.
bool Ledger::did_fit(const Steps& steps) const {
  const policy::StepChoice* const choice = steps.follower.choice();
  const bool is_free = choice == nullptr || (choice->recomputed.empty() && choice->plan.actions.empty());
  const uint64_t away_bytes = statistics_.host_bytes + OptimizerStates::host_bytes() + Weights::host_bytes();
  return is_free && !steps.was_short && away_bytes == 0 && steps.evicted_before_bytes == ever_evicted_bytes_;
}

void Ledger::forget_rest() {
  rest_.forget();
  end_rest_if_over();
}

void Ledger::end_rest_if_over() {
  if (!rest_.is_over() || !by_age_.empty()) return;
  rest_.end();
  for (auto& [device, steps] : steps_) {
    steps.follower.abandon_step();
    begin_anew(steps);
  }
}

// Memory of tags that lies on the host leaves as much of the limit to the rest. A little more of it is no reason for
// another plan. Which optimizer states lie there is for the plan to say, where they are those of this device.
void Ledger::note_elsewhere(c10::Device device, Steps& steps) const {
  const DeviceSide& side = side_of(device);
  uint64_t elsewhere_bytes = side.elsewhere_bytes(device);
  steps.state_bytes = 0;
  if (steps_.size() == 1) {
    steps.state_bytes = OptimizerStates::total_bytes();
    elsewhere_bytes -= std::min(elsewhere_bytes, OptimizerStates::host_bytes());
  }
  const bool is_little_more = elsewhere_bytes >= steps.elsewhere_bytes &&
                              elsewhere_bytes - steps.elsewhere_bytes <= side.limit_bytes(device) / 64;
  if (!is_little_more) steps.elsewhere_bytes = elsewhere_bytes;
}

// When the device came to the marked events: await_marks() has waited for it.
void Ledger::set_times(Steps& steps) {
  if (steps.marks.size() < 2) return;
  try {
    steps.marks.back().second.wait();
    std::vector<std::pair<uint32_t, double>> seconds;
    for (const auto& [event, mark] : steps.marks)
      seconds.emplace_back(event, mark.seconds_since(steps.marks.front().second));
    steps.follower.set_times(seconds);
  } catch (const std::exception&) {
    steps.marks.clear();  // a stream capture, say, in which nothing can be measured
  }
}

// Of the demand, wherever it lies, without states that plans send away.
uint64_t Ledger::limit_now(c10::Device device, const Steps& steps) {
  return side_of(device).limit_bytes(device) + steps.elsewhere_bytes;
}

policy::StepRules Ledger::rules_for(c10::Device device, const Steps& steps) const {
  const auto rate = [&](const Rate& shown) { return assumed_rate_ > 0 ? assumed_rate_ : shown.bytes_per_second(); };
  return {.limits = {limit_now(device, steps), rate(out_), rate(in_), steps.state_bytes,
                     static_cast<double>(steps_per_update_), side_of(device).has_pages()},
          .forbidden = forbidden_,
          .may_recompute = may_recompute_,
          .forced = forced_,
          .is_timed = steps.marks.size() > 1,
          .are_compared = !has_ranks_,
          .was_disturbed = steps.was_disturbed,
          .has_flushed = steps.has_flushed && steps_.size() == 1};  // torch gives back what it has on all devices
}

void Ledger::note_update() {
  const Lock lock(mutex_);
  has_optimizers_ = true;
  if (steps_since_update_ > 0) steps_per_update_ = std::exchange(steps_since_update_, 0);
}

std::optional<uint64_t> Ledger::planned_state_bytes() {
  const Lock lock(mutex_);
  if (steps_.size() != 1 || steps_.begin()->second.follower.plans_made() == 0) return {};
  return steps_.begin()->second.follower.state_bytes();
}

void Ledger::forget_planned_states() {
  const Lock lock(mutex_);
  for (auto& [device, steps] : steps_) steps.follower.forget_state_bytes();
}

// What the plan has on the host, and is not there yet. Returns whether any has left.
bool Ledger::send_planned_states() {
  const uint64_t planned_bytes = planned_state_bytes().value_or(0);
  const uint64_t away_bytes = OptimizerStates::host_bytes();
  if (planned_bytes <= away_bytes) return false;
  const GilReleased without_gil;
  return OptimizerStates::instance().send_away(planned_bytes - away_bytes) > 0;
}

void Ledger::assume_rate(double bytes_per_second) {
  const Lock lock(mutex_);
  assumed_rate_ = bytes_per_second;
}

void Ledger::choose_again() {
  const Lock lock(mutex_);
  for (auto& [index, steps] : steps_)
    steps.follower.choose_again(rules_for(c10::Device(rules().device_type.load(), index), steps));
}

// The follower's actions are those of its last call alone.
void Ledger::note_due(Steps& steps) {
  const policy::StepActions& actions = steps.follower.actions();
  const auto append = [](std::vector<uint64_t>& to, const std::vector<uint64_t>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(steps.due.copies_out, actions.copies_out);
  append(steps.due.releases, actions.releases);
  append(steps.due.loads, actions.loads);
}

void Ledger::watch(Steps& steps, SavedStorage& saved) {
  if (steps.storages.contains(saved.number_)) steps.watched[saved.number_] = kLooks;
}

// Nobody says when the program lets a saved tensor go, so each is looked at for a while. What stays in use, such as a
// parameter, is not looked at for ever.
void Ledger::note_free(Steps& steps) {
  for (auto watched = steps.watched.begin(); watched != steps.watched.end();) {
    auto& [number, looks_left] = *watched;
    const SavedStorage& saved = *steps.storages.at(number);
    const bool is_free = saved.place_ == SavedStorage::Place::kDevice && saved.storage_.use_count() == 1;
    if (is_free) {
      steps.follower.became_free(number);
      note_due(steps);
    }
    watched = is_free || --looks_left == 0 ? steps.watched.erase(watched) : std::next(watched);
  }
}

// An allocation found room once torch had given back its cache. If little of the limit was free then, that lay in
// pieces which a margin spares: it grows step by step, as nobody says how large they were.
void Ledger::note_flushes(c10::Device device, Steps& steps, const DeviceSide::Usage& usage) {
  if (std::exchange(steps.flushes, usage.flushes) == usage.flushes) return;
  steps.has_flushed = true;
  const uint64_t limit_bytes = limit_now(device, steps), margin_bytes = steps.follower.margin_bytes();
  const uint64_t free_bytes = limit_bytes - std::min(limit_bytes, usage.bytes);
  if (free_bytes > limit_bytes / kPiecesPart || margin_bytes > limit_bytes / kPiecesPart) return;
  const uint64_t missing_bytes = free_bytes - std::min(free_bytes, margin_bytes);
  steps.follower.fell_short(std::clamp(missing_bytes, limit_bytes / 64, limit_bytes / 32));
}

// The program reads it now.
void Ledger::want(SavedStorage& saved, const DeviceSide::Usage& usage) {
  Steps& steps = steps_[saved.device_.index()];
  if (!steps.storages.contains(saved.number_)) return;  // of an earlier step
  steps.was_wanted = true;
  steps.follower.wanted(saved.number_, demand_bytes(usage.bytes), now());
  note_due(steps);
  note_flushes(saved.device_, steps, usage);
  mark(saved.device_, steps);
  note_free(steps);
  watch(steps, saved);
  if (!steps.follower.has_plan_for(saved.number_)) load_ahead(steps, saved);
}

// Backward wants what no plan knows in the reverse order of saving: what was saved just before this one comes next.
void Ledger::load_ahead(Steps& steps, const SavedStorage& saved) {
  uint64_t ahead_bytes = 0;
  for (uint64_t back = 1; back <= kMostAhead && back <= saved.number_; ++back) {
    const auto earlier = steps.storages.find(saved.number_ - back);
    if (earlier == steps.storages.end() || earlier->second->place_ != SavedStorage::Place::kHost) continue;
    ahead_bytes += earlier->second->size_bytes_;
    if (ahead_bytes > kMostAheadBytes) return;
    steps.postponed.push_back(earlier->first);
  }
}

// It is about to die.
void Ledger::forget_in_step(SavedStorage& saved) noexcept {
  Steps& steps = steps_[saved.device_.index()];
  if (steps.storages.erase(saved.number_) == 0) return;
  steps.watched.erase(saved.number_);
  try {
    steps.follower.dropped(saved.number_);
    note_due(steps);
    if (steps.storages.empty()) mark(saved.device_, steps);  // the end of the step
  } catch (const std::bad_alloc&) {
    // The step will not look like its plan, and storages leave on demand.
  }
}

// What the plan wants to happen now. What no longer applies is left out. A load that does not fit, since free memory
// lies in pieces or was not yet given back, comes at the next call, before later ones.
void Ledger::perform(c10::Device device) noexcept {
  std::vector<std::shared_ptr<SavedStorage>> kept;  // outlives the lock: their destructor takes it
  Lock lock(mutex_);
  Steps& steps = steps_[device.index()];
  const policy::StepActions due = std::exchange(steps.due, {});
  if (!are_evictions_allowed_) return;
  const auto find = [&](uint64_t number) -> SavedStorage* {
    const auto found = steps.storages.find(number);
    if (!are_evictions_allowed_ || found == steps.storages.end()) return nullptr;
    kept.push_back(found->second->weak_from_this().lock());
    return kept.back().get();
  };
  try {
    std::vector<uint64_t> loads = std::exchange(steps.postponed, {});
    loads.insert(loads.end(), due.loads.begin(), due.loads.end());
    kept.reserve(due.copies_out.size() + due.releases.size() + loads.size());
    for (const uint64_t number : due.copies_out) {
      if (SavedStorage* const saved = find(number)) begin_departure(lock, *saved);
    }
    for (const uint64_t number : due.releases) {
      SavedStorage* const saved = find(number);
      if (saved != nullptr && can_leave(*saved)) send_away(lock, *saved);
    }
    for (auto load = loads.begin(); load != loads.end(); ++load) {
      SavedStorage* const saved = find(*load);
      if (saved == nullptr || begin_arrival(lock, *saved)) continue;
      steps.postponed.insert(steps.postponed.begin(), load, loads.end());
      break;
    }
  } catch (const std::bad_alloc&) {
    // What was left out leaves on demand, or comes back when it is wanted.
  }
}

}  // namespace ebbtide::lms
