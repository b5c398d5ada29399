// What the ledger knows of the calls of modules in a step: by them its events and storages have names.
#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include "policy/lms/mix.h"
#include "torch/lms/device_side.h"
#include "torch/lms/ledger.h"
#include "torch/lms/module_calls.h"
#include "torch/lms/packed.h"

namespace ebbtide::lms {
namespace {

// Of a step whose times are wanted.
constexpr size_t kMostMarks = 8192;

}  // namespace

// The thread's calls have an index in this step. Those that began in an earlier one get one now.
void Ledger::renew_frames(c10::Device device, Steps& steps, uint64_t used_bytes) {
  uint32_t parent = policy::kNone;
  for (CallFrame& frame : open_calls()) {
    if (frame.step != steps.follower.step() || frame.device != device) {
      frame.step = steps.follower.step();
      frame.device = device;
      const uint64_t call = steps.calls[frame.module]++;
      frame.key = policy::mix(policy::mix(frame.module) + call);
      frame.saves = frame.calls = 0;
      frame.are_saved.assign(frame.inputs.size(), false);
      frame.index = steps.follower.entered(
          {frame.key, policy::mix(policy::mix(frame.name) + call), frame.module, frame.kind, parent, frame.input_bytes},
          demand_bytes(used_bytes), now());
      note_due(steps);
    }
    parent = frame.index;
  }
}

uint32_t Ledger::enter_call() {
  const c10::Device device = device_now();
  const DeviceSide::Usage usage = side_of(device).usage(device);  // not under the lock: torch's is taken before it
  uint32_t told = kToldNothing;
  await_marks(device);
  {
    const Lock lock(mutex_);
    Steps& steps = steps_now(device, usage);
    auto& frames = open_calls();
    if (frames.size() > 1) {
      CallFrame& parent = frames[frames.size() - 2];
      ++parent.calls;
      parent.saves = 0;
    }
    renew_frames(device, steps, usage.bytes);
    mark(device, steps);
    if (steps.follower.take_give_back()) told |= kGiveBack;
    if (std::exchange(steps.is_choice_new, false)) told |= kNewChoice;
    if (steps.follower.is_recomputed(frames.back().key)) told |= kRecompute;
  }
  if ((told & kNewChoice) != 0 && send_planned_states()) disturb_step();
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

void Ledger::note_taken(c10::Device device, uint64_t size_bytes) noexcept {
  if (size_bytes < rules().min_bytes.load(std::memory_order_relaxed) || is_resting()) return;
  try {
    const uint64_t used_bytes = side_of(device).used_bytes(device);
    const Lock lock(mutex_);
    const auto steps = steps_.find(device.index());
    if (steps == steps_.end() || steps->second.storages.empty()) return;
    steps->second.follower.missed(demand_bytes(used_bytes));
  } catch (const std::exception&) {
    // It is found out later, by a shortage.
  }
}

// The name of a storage that is saved now: the outermost call that got it as an argument, or the innermost call, and
// the order there.
policy::NewStorage Ledger::name_storage(const c10::Storage& storage, Steps& steps, uint64_t used_bytes) {
  renew_frames(storage.device(), steps, used_bytes);
  auto& frames = open_calls();
  policy::NewStorage named{.size_bytes = storage.nbytes(), .stays = !may_evict_};
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
  if (!frames.empty()) {
    named.call = frames.back().index;
    named.stays |= std::any_of(frames.begin(), frames.end(), [](const CallFrame& frame) { return frame.keeps; });
  }
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

void Ledger::set_rules(bool may_recompute, bool may_evict, bool may_rest, bool are_new,
                       std::shared_ptr<const policy::ForcedChoice> forced) {
  const Lock lock(mutex_);
  if (are_new)
    for (auto& [device, steps] : steps_) steps.follower.forget_known();
  may_recompute_ = may_recompute;
  may_evict_ = may_evict;
  may_rest_ = may_rest;
  forced_ = std::move(forced);
  forget_rest();
}

void Ledger::set_ranks(bool has_ranks) {
  const Lock lock(mutex_);
  has_ranks_ = has_ranks;
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
    for (const policy::Block& block : choice->recomputed) {
      const policy::ModuleCall& call = choice->record.calls[block.call];
      found.push_back({call.module, call.name, block.dropped_bytes, block.forward_seconds});
    }
  }
  return found;
}

std::vector<uint64_t> Ledger::candidates() {
  const Lock lock(mutex_);
  std::vector<uint64_t> found;
  for (const auto& [device, steps] : steps_) {
    const policy::KnownStep* const step = steps.follower.latest();
    if (step == nullptr) continue;
    const std::vector<uint64_t> modules = step->candidates();
    found.insert(found.end(), modules.begin(), modules.end());
  }
  return found;
}

std::optional<std::pair<policy::KnownStep, uint64_t>> Ledger::latest_step() {
  const Lock lock(mutex_);
  std::optional<std::pair<policy::KnownStep, uint64_t>> found;
  for (const auto& [device, steps] : steps_) {
    const policy::KnownStep* const step = steps.follower.latest();
    if (step == nullptr) continue;
    if (!found || step->whole().events.size() > found->first.whole().events.size())
      found.emplace(*step, steps.elsewhere_bytes);
  }
  return found;
}

}  // namespace ebbtide::lms
