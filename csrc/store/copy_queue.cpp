#include "store/copy_queue.h"

#include <algorithm>

namespace ebbtide {

size_t CopyQueue::submit(const CopyJob& job) {
  const size_t piece_bytes = job.backup->direct() != nullptr ? kDirectPieceBytes : slot_bytes_;
  const std::lock_guard lock(mutex_);
  const size_t number = pieces_left_.size();
  size_t count = 0;
  for (const CopyRange& range : job.ranges) {
    for (size_t done = 0; done < range.size_bytes; done += piece_bytes, ++count) {
      const size_t offset = range.offset + done;
      pieces_.push_back({number, job.device_address + offset, job.backup, job.offset + offset,
                         std::min(piece_bytes, range.size_bytes - done), job.must_compare});
    }
  }
  pieces_left_.push_back(count);
  if (count == 0) {
    landed_jobs_.push_back(number);
    landed_.notify_one();
  } else {
    ++open_jobs_;
    taken_.notify_all();
  }
  return number;
}

void CopyQueue::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  taken_.notify_all();
  landed_.notify_one();
}

std::optional<CopyPiece> CopyQueue::try_take(bool has_slot) {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr || pieces_.empty()) return std::nullopt;
  if (!has_slot && !pieces_.front().is_direct()) return std::nullopt;
  const CopyPiece piece = pieces_.front();
  pieces_.pop_front();
  return piece;
}

std::optional<CopyPiece> CopyQueue::wait_take() {
  std::unique_lock lock(mutex_);
  taken_.wait(lock, [&] { return !pieces_.empty() || is_closed_ || failure_ != nullptr; });
  if (failure_ != nullptr || pieces_.empty()) return std::nullopt;
  const CopyPiece piece = pieces_.front();
  pieces_.pop_front();
  return piece;
}

void CopyQueue::complete(const CopyPiece& piece) {
  const std::lock_guard lock(mutex_);
  if (--pieces_left_[piece.job] != 0) return;
  --open_jobs_;
  landed_jobs_.push_back(piece.job);
  landed_.notify_one();
}

void CopyQueue::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_ == nullptr) failure_ = std::move(error);
  taken_.notify_all();
  landed_.notify_one();
}

void CopyQueue::rethrow_failure() const {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

std::optional<size_t> CopyQueue::poll_landed() {
  const std::lock_guard lock(mutex_);
  if (landed_jobs_.empty()) return std::nullopt;
  const size_t job = landed_jobs_.front();
  landed_jobs_.pop_front();
  return job;
}

bool CopyQueue::is_over_locked() const { return failure_ != nullptr ? threads_ == 0 : is_closed_ && open_jobs_ == 0; }

std::optional<size_t> CopyQueue::wait_landed() {
  std::unique_lock lock(mutex_);
  landed_.wait(lock, [&] { return !landed_jobs_.empty() || is_over_locked(); });
  if (landed_jobs_.empty()) return std::nullopt;
  const size_t job = landed_jobs_.front();
  landed_jobs_.pop_front();
  return job;
}

void CopyQueue::thread_started() {
  const std::lock_guard lock(mutex_);
  ++threads_;
}

void CopyQueue::thread_ended() {
  const std::lock_guard lock(mutex_);
  --threads_;
  landed_.notify_one();
}

}  // namespace ebbtide
