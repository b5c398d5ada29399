#include "torch/lms/optimizer_states.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "api/ebbtide.h"
#include "torch/lms/gil.h"

namespace ebbtide::lms {
namespace {

constexpr const char* kTags[] = {"lms.optimizer"};  // python/ebbtide/lms/optimizer_states.py
constexpr TagMemory memory(kTags);

OptimizerStates* only = nullptr;

}  // namespace

// The right to move states, if this thread gets it.
class OptimizerStates::Turn {
 public:
  explicit Turn(OptimizerStates& states) : states_(states) {
    const Lock lock(states_.mutex_);
    const size_t own = states_.steps_.count(std::this_thread::get_id());
    is_taken_ =
        states_.are_moves_allowed_ && !states_.is_moving_ && states_.waiting_ == 0 && states_.steps_.size() == own;
    if (is_taken_) states_.is_moving_ = true;
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (!is_taken_) return;
    {
      const Lock lock(states_.mutex_);
      states_.is_moving_ = false;
    }
    states_.moved_.notify_all();
  }
  explicit operator bool() const { return is_taken_; }

 private:
  OptimizerStates& states_;
  bool is_taken_ = false;
};

OptimizerStates& OptimizerStates::instance() {
  static OptimizerStates& states = *new OptimizerStates();
  return states;
}

OptimizerStates::OptimizerStates() {
  only = this;
  // A child never finds the lock held, nor waits, for a thread that it does not have.
  ::pthread_atfork([] { only->mutex_.lock(); }, [] { only->mutex_.unlock(); },
                   [] {
                     only->is_moving_ = only->are_moves_allowed_ = false;
                     only->waiting_ = 0;
                     only->mutex_.unlock();
                   });
}

void OptimizerStates::allow_moves(bool are_allowed) {
  Lock lock(mutex_);
  are_moves_allowed_ = are_allowed;
  if (!are_allowed) moved_.wait(lock, [&] { return !is_moving_; });
}

void OptimizerStates::begin_step() {
  Lock lock(mutex_);
  ++waiting_;
  moved_.wait(lock, [&] { return !is_moving_; });
  --waiting_;
  if (is_broken_) {
    is_moving_ = true;
    lock.unlock();
    const bool is_mended = memory.mend();
    lock.lock();
    is_moving_ = false;
    is_broken_ = !is_mended;
    moved_.notify_all();
    if (!is_mended) throw std::runtime_error("optimizer states are not mapped since a move failed: " + problem_);
  }
  ++steps_[std::this_thread::get_id()];
}

void OptimizerStates::end_step(std::thread::id thread) noexcept {
  const Lock lock(mutex_);
  const auto found = steps_.find(thread);
  if (found != steps_.end() && --found->second == 0) steps_.erase(found);
}

bool OptimizerStates::is_in_step() {
  const Lock lock(mutex_);
  return steps_.contains(std::this_thread::get_id());
}

uint64_t OptimizerStates::make_room(uint64_t wanted_bytes) noexcept {
  const GilReleased released;
  const Turn turn(*this);
  if (!turn) return 0;
  {
    const Lock lock(mutex_);
    problem_.clear();
  }
  uint64_t freed_bytes = 0;
  // Memory leaves by whole handles, so more than is wanted may have to go.
  for (uint64_t most_bytes = wanted_bytes; freed_bytes < wanted_bytes;) {
    const TagMemory::Amounts info = memory.query();
    uint64_t moved_bytes = 0;
    if (info.resident_bytes <= info.host_bytes || !demote(most_bytes, &moved_bytes)) break;
    freed_bytes += moved_bytes;
    if (moved_bytes == 0 && most_bytes >= info.resident_bytes) break;
    most_bytes = moved_bytes == 0 ? 2 * most_bytes : wanted_bytes - std::min(wanted_bytes, freed_bytes);
  }
  const Lock lock(mutex_);
  (steps_.empty() ? statistics_.short_bytes : statistics_.step_short_bytes) += freed_bytes;
  return freed_bytes;
}

uint64_t OptimizerStates::send_away(uint64_t most_bytes) noexcept {
  uint64_t moved_bytes = 0;
  if (const Turn turn(*this); turn) demote(most_bytes, &moved_bytes);
  return moved_bytes;
}

uint64_t OptimizerStates::bring_back(uint64_t most_bytes) noexcept {
  const Turn turn(*this);
  if (!turn) return 0;
  const Moved moved = memory.promote(most_bytes, /*keeps_host=*/false);
  if (moved.has_failed) note_failure(moved);
  const Lock lock(mutex_);
  statistics_.loaded_bytes += moved.bytes;
  return moved.bytes;
}

bool OptimizerStates::demote(uint64_t most_bytes, uint64_t* moved_bytes) noexcept {
  const Moved moved = memory.demote(most_bytes);
  if (moved.has_failed) {
    note_failure(moved);
    return false;
  }
  *moved_bytes = moved.bytes;
  const Lock lock(mutex_);
  statistics_.evicted_bytes += moved.bytes;
  problem_.clear();
  return true;
}

// What reads memory next that is not mapped can't wait for a step.
void OptimizerStates::note_failure(const Moved& moved) noexcept {
  const Lock lock(mutex_);
  is_broken_ = moved.is_broken;
  try {
    problem_ = moved.problem;
  } catch (const std::bad_alloc&) {
    problem_.clear();
  }
}

uint64_t OptimizerStates::host_bytes() { return memory.query().host_bytes; }

void OptimizerStates::count_slow_read() {
  const Lock lock(mutex_);
  ++statistics_.slow_reads;
}

StateStatistics OptimizerStates::statistics() {
  const Lock lock(mutex_);
  return statistics_;
}

void OptimizerStates::reset_statistics() {
  const Lock lock(mutex_);
  statistics_ = {};
}

std::string OptimizerStates::problem() {
  const Lock lock(mutex_);
  return problem_;
}

}  // namespace ebbtide::lms
