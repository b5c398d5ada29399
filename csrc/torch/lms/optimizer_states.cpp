#include "torch/lms/optimizer_states.h"

#include <algorithm>

#include "api/ebbtide.h"
#include "torch/lms/gil.h"

namespace ebbtide::lms {
namespace {

constexpr const char* kStateTags[] = {"lms.optimizer"};  // python/ebbtide/lms/optimizer_states.py
constexpr TagMemory state_memory(kStateTags);

}  // namespace

OptimizerStates& OptimizerStates::instance() {
  static OptimizerStates& states = *new OptimizerStates();
  return states;
}

OptimizerStates::OptimizerStates() : gate_(state_memory, "optimizer states") {}

MoveGate::Turn OptimizerStates::take_turn() {
  return {gate_, [this] { return steps_.size() == steps_.count(std::this_thread::get_id()); }};
}

void OptimizerStates::allow_moves(bool are_allowed) {
  Lock lock = gate_.lock();
  gate_.allow(lock, are_allowed);
}

void OptimizerStates::begin_step() {
  Lock lock = gate_.lock();
  gate_.wait_for_move(lock);
  ++steps_[std::this_thread::get_id()];
}

void OptimizerStates::end_step(std::thread::id thread) noexcept {
  const Lock lock = gate_.lock();
  const auto found = steps_.find(thread);
  if (found != steps_.end() && --found->second == 0) steps_.erase(found);
}

bool OptimizerStates::is_in_step() {
  const Lock lock = gate_.lock();
  return steps_.contains(std::this_thread::get_id());
}

uint64_t OptimizerStates::make_room(uint64_t wanted_bytes) noexcept {
  const GilReleased released;
  const MoveGate::Turn turn = take_turn();
  if (!turn) return 0;
  gate_.forget_problem(gate_.lock());
  uint64_t freed_bytes = 0;
  // Memory leaves by whole handles, so more than is wanted may have to go.
  for (uint64_t most_bytes = wanted_bytes; freed_bytes < wanted_bytes;) {
    const TagMemory::Amounts info = state_memory.query();
    if (info.resident_bytes <= info.host_bytes) break;
    const Moved moved = demote(most_bytes);
    freed_bytes += moved.bytes;
    if (moved.has_failed || (moved.bytes == 0 && most_bytes >= info.resident_bytes)) break;
    most_bytes = moved.bytes == 0 ? 2 * most_bytes : wanted_bytes - std::min(wanted_bytes, freed_bytes);
  }
  const Lock lock = gate_.lock();
  (steps_.empty() ? statistics_.short_bytes : statistics_.step_short_bytes) += freed_bytes;
  return freed_bytes;
}

uint64_t OptimizerStates::send_away(uint64_t most_bytes) noexcept {
  const MoveGate::Turn turn = take_turn();
  return turn ? demote(most_bytes).bytes : 0;
}

uint64_t OptimizerStates::bring_back(uint64_t most_bytes) noexcept {
  const MoveGate::Turn turn = take_turn();
  if (!turn) return 0;
  const Moved moved = state_memory.promote(most_bytes, /*keeps_host=*/false);
  const Lock lock = gate_.lock();
  gate_.note(lock, moved);
  statistics_.loaded_bytes += moved.bytes;
  return moved.bytes;
}

Moved OptimizerStates::demote(uint64_t most_bytes) noexcept {
  Moved moved = state_memory.demote(most_bytes);
  const Lock lock = gate_.lock();
  gate_.note(lock, moved);
  statistics_.evicted_bytes += moved.bytes;
  return moved;
}

uint64_t OptimizerStates::total_bytes() { return state_memory.query().resident_bytes; }

uint64_t OptimizerStates::host_bytes() { return state_memory.query().host_bytes; }

void OptimizerStates::count_slow_read() {
  const Lock lock = gate_.lock();
  ++statistics_.slow_reads;
}

StateStatistics OptimizerStates::statistics() {
  const Lock lock = gate_.lock();
  return statistics_;
}

void OptimizerStates::reset_statistics() {
  const Lock lock = gate_.lock();
  statistics_ = {};
}

std::string OptimizerStates::problem() { return gate_.problem(); }

}  // namespace ebbtide::lms
