#include "torch/lms/optimizer_states.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "api/ebbtide.h"
#include "torch/lms/gil.h"

namespace ebbtide::lms {
namespace {

constexpr const char* kTag = "lms.optimizer";  // python/ebbtide/lms/optimizer_states.py

OptimizerStates* only = nullptr;

ebbtide_tag_info query_tag() {
  ebbtide_tag_info info = EBBTIDE_TAG_INFO_INIT;
  int is_found = 0;
  ebbtide_query_tag(kTag, &is_found, &info, nullptr);
  return info;
}

ebbtide_request request_for(uint64_t most_bytes) {
  static const char* const tags[] = {kTag};
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.tags = tags;
  request.tag_count = 1;
  request.missing_ok = 1;
  request.max_bytes = most_bytes;
  return request;
}

uint64_t bytes_of(ebbtide_report* report) {
  ebbtide_report_totals totals = EBBTIDE_REPORT_TOTALS_INIT;
  ebbtide_read_report(report, &totals, nullptr);
  ebbtide_free_report(report);
  return totals.bytes;
}

}  // namespace

// The right to move states, if this thread gets it.
class OptimizerStates::Turn {
 public:
  explicit Turn(OptimizerStates& states) : states_(states) {
    const Lock lock(states_.mutex_);
    const size_t own = states_.steps_.count(std::this_thread::get_id());
    is_taken_ = states_.are_moves_allowed_ && !states_.is_moving_ && states_.steps_.size() == own;
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
  moved_.wait(lock, [&] { return !is_moving_; });
  if (is_broken_) {
    is_moving_ = true;
    lock.unlock();
    const bool is_mended = mend();
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
  uint64_t freed_bytes = 0;
  // Memory leaves by whole handles, so more than is wanted may have to go.
  for (uint64_t most_bytes = wanted_bytes; freed_bytes < wanted_bytes;) {
    const ebbtide_tag_info info = query_tag();
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
  const ebbtide_request request = request_for(most_bytes);
  ebbtide_report* report = nullptr;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const ebbtide_status status = ebbtide_promote(&request, &report, &error);
  if (status != EBBTIDE_OK) {
    note_failure(status, error.message);
    return 0;
  }
  const uint64_t moved_bytes = bytes_of(report);
  const Lock lock(mutex_);
  statistics_.loaded_bytes += moved_bytes;
  return moved_bytes;
}

bool OptimizerStates::demote(uint64_t most_bytes, uint64_t* moved_bytes) noexcept {
  const ebbtide_request request = request_for(most_bytes);
  ebbtide_report* report = nullptr;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const ebbtide_status status = ebbtide_demote(&request, &report, &error);
  if (status != EBBTIDE_OK) {
    note_failure(status, error.message);
    return false;
  }
  *moved_bytes = bytes_of(report);
  const Lock lock(mutex_);
  statistics_.evicted_bytes += *moved_bytes;
  problem_.clear();
  return true;
}

// A driver call that failed may have left memory whole, but not mapped. What reads it next can't wait for a step.
void OptimizerStates::note_failure(int status, const char* message) noexcept {
  const bool is_broken = !mend();
  const Lock lock(mutex_);
  is_broken_ = is_broken;
  try {
    problem_ = status == EBBTIDE_STATE_ERROR ? "" : message;  // refused: as where nothing was tried
  } catch (const std::bad_alloc&) {
    problem_.clear();
  }
}

bool OptimizerStates::mend() noexcept {
  const ebbtide_request request = request_for(UINT64_MAX);
  return query_tag().detached_bytes == 0 || ebbtide_resume(&request, nullptr, nullptr) == EBBTIDE_OK;
}

uint64_t OptimizerStates::host_bytes() { return query_tag().host_bytes; }

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
