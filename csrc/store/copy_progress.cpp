#include "store/copy_progress.h"

#include <algorithm>

namespace ebbtide {

CopyProgress::CopyProgress(std::span<const CopyJob> jobs, size_t piece_bytes)
    : pieces_left_(new std::atomic<size_t>[jobs.size()]) {
  for (size_t job = 0; job < jobs.size(); ++job) {
    const size_t before = pieces_.size();
    for (size_t offset = 0; offset < jobs[job].size_bytes; offset += piece_bytes) {
      pieces_.push_back({job, offset, std::min(piece_bytes, jobs[job].size_bytes - offset)});
    }
    pieces_left_[job].store(pieces_.size() - before, std::memory_order_relaxed);
  }
}

std::optional<Piece> CopyProgress::take() {
  if (has_failed()) return std::nullopt;
  const size_t index = next_piece_.fetch_add(1, std::memory_order_relaxed);
  if (index >= pieces_.size()) return std::nullopt;
  return pieces_[index];
}

void CopyProgress::complete(const Piece& piece) {
  if (pieces_left_[piece.job].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::lock_guard lock(mutex_);
  landed_.push_back(piece.job);
  changed_.notify_all();
}

void CopyProgress::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_ == nullptr) failure_ = std::move(error);
  has_failed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void CopyProgress::rethrow_failure() const {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

std::optional<size_t> CopyProgress::wait_landed(int thread_count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !landed_.empty() || threads_ended_ == thread_count; });
  if (landed_.empty()) return std::nullopt;
  const size_t job = landed_.front();
  landed_.pop_front();
  return job;
}

std::optional<size_t> CopyProgress::poll_landed() {
  const std::lock_guard lock(mutex_);
  if (landed_.empty()) return std::nullopt;
  const size_t job = landed_.front();
  landed_.pop_front();
  return job;
}

void CopyProgress::thread_ended() {
  const std::lock_guard lock(mutex_);
  ++threads_ended_;
  changed_.notify_all();
}

}  // namespace ebbtide
