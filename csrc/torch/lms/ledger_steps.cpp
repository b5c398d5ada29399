// What the ledger knows of training steps, and what it does of their plans.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "policy/lms/mix.h"
#include "torch/lms/device_side.h"
#include "torch/lms/gil.h"
#include "torch/lms/ledger.h"
#include "torch/lms/module_calls.h"
#include "torch/lms/packed.h"

namespace ebbtide::lms {
namespace {

// A rate is that of the latest copies, as many as have these bytes at most.
constexpr double kRememberedBytes = 4e9;
// How often a storage is looked at before it counts as one that stays in use.
constexpr int kLooks = 1024;
// Of storages that no plan knows, so many at most come back ahead of need at once.
constexpr size_t kMostAhead = 8;
constexpr uint64_t kMostAheadBytes = uint64_t{512} << 20;
// Of a step whose times are wanted.
constexpr size_t kMostMarks = 8192;

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

Ledger::Steps& Ledger::steps_now(c10::Device device) {
  Steps& steps = steps_[device.index()];
  if (has_ended(steps)) end_step(device, steps);
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
void Ledger::end_step(c10::Device device, Steps& steps) {
  const DeviceSide& side = side_of(device);
  const uint64_t limit_bytes = side.limit_bytes(device);
  if (steps.was_wanted) {
    // Memory of tags that lies on the host leaves as much of the limit to the rest. A little more of it is no reason
    // for another plan.
    const uint64_t elsewhere_bytes = side.elsewhere_bytes(device);
    const bool is_little_more =
        elsewhere_bytes >= steps.elsewhere_bytes && elsewhere_bytes - steps.elsewhere_bytes <= limit_bytes / 64;
    if (!is_little_more) steps.elsewhere_bytes = elsewhere_bytes;
    set_times(steps);
    const uint64_t plans_before = steps.follower.plans_made();
    steps.follower.end_step(rules_for(device, steps));
    steps.is_choice_new = steps.follower.plans_made() != plans_before;
  } else {
    steps.follower.abandon_step();
  }
  steps.due = {};
  steps.postponed.clear();
  steps.calls.clear();
  steps.marks.clear();
  steps.was_wanted = steps.was_disturbed = false;
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

policy::StepRules Ledger::rules_for(c10::Device device, const Steps& steps) const {
  const uint64_t limit_bytes = side_of(device).limit_bytes(device) + steps.elsewhere_bytes;
  const auto rate = [&](const Rate& shown) { return assumed_rate_ > 0 ? assumed_rate_ : shown.bytes_per_second(); };
  return {.limits = {limit_bytes, rate(out_), rate(in_)},
          .forbidden = forbidden_,
          .may_recompute = may_recompute_,
          .is_timed = steps.marks.size() > 1,
          .was_disturbed = steps.was_disturbed};
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

// --- calls of modules ---

// The thread's calls have an index in this step. Those that began in an earlier one get one now.
void Ledger::renew_frames(c10::Device device, Steps& steps, uint64_t used_bytes) {
  uint32_t parent = policy::kNone;
  for (CallFrame& frame : open_calls()) {
    if (frame.step != steps.follower.step() || frame.device != device) {
      frame.step = steps.follower.step();
      frame.device = device;
      frame.key = policy::mix(policy::mix(frame.module) + steps.calls[frame.module]++);
      frame.saves = frame.calls = 0;
      frame.are_saved.assign(frame.inputs.size(), false);
      frame.index =
          steps.follower.entered(frame.key, frame.module, parent, frame.input_bytes, demand_bytes(used_bytes), now());
      note_due(steps);
    }
    parent = frame.index;
  }
}

uint32_t Ledger::enter_call() {
  const c10::Device device = device_now();
  const uint64_t used_bytes = side_of(device).used_bytes(device);  // not under the lock: torch's is taken before it
  uint32_t told = kToldNothing;
  await_marks(device);
  {
    const Lock lock(mutex_);
    Steps& steps = steps_now(device);
    auto& frames = open_calls();
    if (frames.size() > 1) {
      CallFrame& parent = frames[frames.size() - 2];
      ++parent.calls;
      parent.saves = 0;
    }
    renew_frames(device, steps, used_bytes);
    mark(device, steps);
    if (std::exchange(steps.is_choice_new, false)) told |= kNewChoice;
    if (steps.follower.is_recomputed(frames.back().key)) told |= kRecompute;
  }
  perform(device);
  return told;
}

void Ledger::leave_call() noexcept {
  const CallFrame& frame = open_calls().back();
  try {
    const uint64_t used_bytes = side_of(frame.device).used_bytes(frame.device);
    {
      const Lock lock(mutex_);
      Steps& steps = steps_[frame.device.index()];
      if (frame.step != steps.follower.step() || frame.index == policy::kNone) return;
      steps.follower.returned(frame.index, demand_bytes(used_bytes), now());
      note_due(steps);
      mark(frame.device, steps);
    }
    perform(frame.device);
  } catch (const std::exception&) {
    // The step will not look like its plan, and storages leave on demand.
  }
}

void Ledger::note_demand() noexcept {
  try {
    const c10::Device device = device_now();
    const uint64_t used_bytes = side_of(device).used_bytes(device);
    const Lock lock(mutex_);
    steps_[device.index()].follower.missed(demand_bytes(used_bytes));
  } catch (const std::exception&) {
    // It is found out later, by a shortage.
  }
}

// The name of a storage that is saved now: the outermost call that got it as an argument, or the innermost call, and
// the order there.
policy::NewStorage Ledger::name_storage(const c10::Storage& storage, Steps& steps, uint64_t used_bytes) {
  renew_frames(storage.device(), steps, used_bytes);
  auto& frames = open_calls();
  policy::NewStorage named{.size_bytes = storage.nbytes()};
  const CallFrame* receiver = nullptr;
  size_t place = 0;
  for (CallFrame& frame : frames) {
    const auto found = std::find(frame.inputs.begin(), frame.inputs.end(), storage.unsafeGetStorageImpl());
    if (found == frame.inputs.end()) continue;
    const auto at = static_cast<size_t>(found - frame.inputs.begin());
    if (!frame.are_saved[at]) steps.follower.saved_input(frame.index, storage.nbytes());
    frame.are_saved[at] = true;
    if (receiver != nullptr) continue;
    receiver = &frame;
    place = at;
  }
  if (!frames.empty()) named.call = frames.back().index;
  if (receiver != nullptr) {
    named.input_of = receiver->index;
    named.key = policy::mix(policy::mix(receiver->key ^ 1) + place);
  } else if (!frames.empty()) {
    CallFrame& frame = frames.back();
    named.key = policy::mix(policy::mix(policy::mix(frame.key) + frame.calls) + frame.saves++);
  } else {
    named.key = policy::mix(steps.calls[0]++);
  }
  return named;
}

void Ledger::mark(c10::Device device, Steps& steps) {
  if (!steps.follower.wants_times() || steps.marks.size() >= kMostMarks || steps.follower.event_count() == 0) return;
  try {
    steps.marks.emplace_back(steps.follower.event_count() - 1, side_of(device).mark(device, now()));
  } catch (const std::exception&) {
    // The step has one time less.
  }
}

void Ledger::forbid_recomputation(uint64_t module, bool is_forbidden) {
  const Lock lock(mutex_);
  if (is_forbidden) {
    forbidden_.insert(module);
  } else {
    forbidden_.erase(module);
  }
}

void Ledger::allow_recomputation(bool is_allowed) {
  const Lock lock(mutex_);
  may_recompute_ = is_allowed;
}

void Ledger::disturb_step() {
  const Lock lock(mutex_);
  for (auto& [device, steps] : steps_) steps.was_disturbed = true;
}

std::vector<Ledger::BlockReport> Ledger::recomputed_blocks() {
  const Lock lock(mutex_);
  std::vector<BlockReport> found;
  for (const auto& [device, steps] : steps_) {
    const policy::StepChoice* const choice = steps.follower.latest_choice();
    if (choice == nullptr) continue;
    for (const policy::Block& block : choice->recomputed)
      found.push_back({choice->record.calls[block.call].module, block.dropped_bytes, block.forward_seconds});
  }
  return found;
}

// --- saved tensors ---

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

// The program reads it now.
void Ledger::want(SavedStorage& saved, uint64_t used_bytes) {
  Steps& steps = steps_[saved.device_.index()];
  if (!steps.storages.contains(saved.number_)) return;  // of an earlier step
  steps.was_wanted = true;
  steps.follower.wanted(saved.number_, demand_bytes(used_bytes), now());
  note_due(steps);
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
