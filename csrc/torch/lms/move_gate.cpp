#include "torch/lms/move_gate.h"

#include <pthread.h>

#include <atomic>
#include <new>
#include <stdexcept>

namespace ebbtide::lms {
namespace {

std::atomic<MoveGate*> newest{nullptr};
MoveGate* at_fork = nullptr;  // the newest one when a fork began: later ones are not locked

}  // namespace

MoveGate::MoveGate(const TagMemory& memory, const char* what) : memory_(memory), what_(what), next_(newest.load()) {
  while (!newest.compare_exchange_weak(next_, this)) {
  }
  [[maybe_unused]] static const int registered = ::pthread_atfork(&before_fork, &after_fork, &after_fork_in_child);
}

void MoveGate::before_fork() {
  MoveGate* const first = newest.load();
  for (MoveGate* gate = first; gate != nullptr; gate = gate->next_) gate->mutex_.lock();
  at_fork = first;  // the oldest one's lock, which all forks take, guards it
}

void MoveGate::after_fork() {
  for (MoveGate* gate = at_fork; gate != nullptr; gate = gate->next_) gate->mutex_.unlock();
}

void MoveGate::after_fork_in_child() {
  for (MoveGate* gate = at_fork; gate != nullptr; gate = gate->next_) {
    gate->is_moving_ = gate->are_moves_allowed_ = false;
    gate->waiting_ = 0;
    gate->mutex_.unlock();
  }
}

void MoveGate::allow(Lock& lock, bool are_allowed) {
  are_moves_allowed_ = are_allowed;
  if (are_allowed) return;
  moved_.wait(lock, [&] { return !is_moving_; });
  mend(lock);  // no use announces itself from now on
}

void MoveGate::wait_for_move(Lock& lock) {
  ++waiting_;
  moved_.wait(lock, [&] { return !is_moving_; });
  --waiting_;
  mend(lock);
}

void MoveGate::mend(Lock& lock) {
  if (!is_broken_) return;
  is_moving_ = true;
  lock.unlock();
  const bool is_mended = memory_.mend();
  lock.lock();
  is_moving_ = false;
  is_broken_ = !is_mended;
  moved_.notify_all();
  if (!is_mended) throw std::runtime_error(std::string(what_) + " are not mapped since a move failed: " + problem_);
}

void MoveGate::note(const Lock& /*lock*/, const Moved& moved) noexcept {
  is_broken_ = moved.is_broken;
  try {
    problem_ = moved.problem;
  } catch (const std::bad_alloc&) {
    problem_.clear();
  }
}

std::string MoveGate::problem() {
  const Lock own = lock();
  return problem_;
}

}  // namespace ebbtide::lms
