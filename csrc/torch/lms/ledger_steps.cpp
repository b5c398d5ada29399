// What the ledger knows of training steps, and what it does of their plans.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "torch/lms/device_side.h"
#include "torch/lms/ledger.h"

namespace ebbtide::lms {
namespace {

// A rate is that of the latest copies, as many as have these bytes at most.
constexpr double kRememberedBytes = 4e9;
// How many plans for one limit begin with an empty cache of torch's.
constexpr uint64_t kMostFreshStarts = 8;
// How often a storage is looked at before it counts as one that stays in use.
constexpr int kLooks = 64;

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

// What torch caches lies in the pieces that earlier steps made of it. So where a step was short of memory in spite of
// the plan that it followed, the plan that is made at its end begins without them. Not for ever: where tensors differ
// much in size, the pieces come to fit better than what the driver would have to make anew each time.
bool Ledger::end_step(c10::Device device, Steps& steps) {
  const uint64_t limit_bytes = side_of(device).limit_bytes(device);
  if (std::exchange(steps.limit_bytes, limit_bytes) != limit_bytes) steps.margin_bytes = steps.fresh_starts = 0;
  // Free memory lies in pieces. A plan that fills the device to its limit is short of memory in spite of it. What had
  // to leave only because of the pieces comes to less where a plan leaves room for some of it.
  const uint64_t added_bytes = std::exchange(steps.short_bytes, 0) + std::exchange(steps.unforeseen_bytes, 0) / 4;
  steps.margin_bytes = std::min(steps.margin_bytes + added_bytes, limit_bytes / 4);
  // Memory of tags that lies on the host leaves as much of the limit to the rest. A little more of it is no reason for
  // another plan.
  const uint64_t elsewhere_bytes = side_of(device).elsewhere_bytes(device);
  const bool is_little_more =
      elsewhere_bytes >= steps.elsewhere_bytes && elsewhere_bytes - steps.elsewhere_bytes <= limit_bytes / 64;
  if (!is_little_more) steps.elsewhere_bytes = elsewhere_bytes;
  const uint64_t plans_before = steps.follower.plans_made();
  steps.follower.end_step(
      {limit_bytes - steps.margin_bytes + steps.elsewhere_bytes, out_.bytes_per_second(), in_.bytes_per_second()});
  steps.due = {};
  steps.postponed.clear();
  steps.was_wanted = false;
  const bool is_planned_anew = added_bytes > 0 && steps.follower.plans_made() != plans_before;
  return is_planned_anew && steps.fresh_starts++ < kMostFreshStarts;
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

// The program reads it now.
void Ledger::want(SavedStorage& saved, uint64_t used_bytes) {
  Steps& steps = steps_[saved.device_.index()];
  if (!steps.storages.contains(saved.number_)) return;  // of an earlier step
  steps.was_wanted = true;
  steps.follower.wanted(saved.number_, demand_bytes(used_bytes), now());
  note_due(steps);
  note_free(steps);
  watch(steps, saved);
}

// It is about to die.
void Ledger::forget_in_step(SavedStorage& saved) noexcept {
  Steps& steps = steps_[saved.device_.index()];
  if (steps.storages.erase(saved.number_) == 0) return;
  steps.watched.erase(saved.number_);
  try {
    steps.follower.dropped(saved.number_);
    note_due(steps);
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
