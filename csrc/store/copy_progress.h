#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "store/copier.h"

// What the threads of one copy share: which piece is next, which jobs are complete, whether to stop. No driver calls.
namespace ebbtide {

struct Piece {
  size_t job = 0;
  size_t offset = 0;  // in the job
  size_t size_bytes = 0;
};

class CopyProgress {
 public:
  CopyProgress(std::span<const CopyJob> jobs, size_t piece_bytes);

  // The next piece that nobody has taken; none at the end or after a failure.
  std::optional<Piece> take();
  // One piece is in place. The job is announced with its last piece.
  void complete(const Piece& piece);
  // The first failure wins; every thread then takes no more pieces.
  void fail(std::exception_ptr error) noexcept;
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  void rethrow_failure() const;

  // A job that has landed and was not handed out yet; waits for one while any of thread_count threads still runs. None when all have ended and all is handed out.
  std::optional<size_t> wait_landed(int thread_count);
  std::optional<size_t> poll_landed();
  void thread_ended();

 private:
  std::vector<Piece> pieces_;
  std::atomic<size_t> next_piece_{0};
  std::unique_ptr<std::atomic<size_t>[]> pieces_left_;  // by job
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<size_t> landed_;
  std::exception_ptr failure_;
  int threads_ended_ = 0;
};

}  // namespace ebbtide
