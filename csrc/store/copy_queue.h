#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "driver/driver.h"
#include "store/store.h"

// What the threads of one copy share: which pieces are to be moved, which jobs are complete, whether to stop. No driver calls. Thread-safe.
namespace ebbtide {

// A part of a job that moves; what lies between stays as it is.
struct CopyRange {
  size_t offset = 0;  // in the job
  size_t size_bytes = 0;
};

// One chunk's bytes.
struct CopyJob {
  CUdeviceptr device_address = 0;
  Backup* backup = nullptr;
  size_t offset = 0;  // of the chunk, in the backup
  std::span<const CopyRange> ranges;
  // To the store: what the store holds already is compared first and written only where it differs.
  bool must_compare = false;
};

// At most a slot of a job's bytes; where the copy engine reaches the backup by itself, kDirectPieceBytes.
struct CopyPiece {
  size_t job = 0;
  CUdeviceptr device_address = 0;
  Backup* backup = nullptr;
  size_t offset = 0;  // in the backup
  size_t size_bytes = 0;
  bool must_compare = false;
  bool is_direct() const { return backup->direct() != nullptr; }
};

inline constexpr size_t kDirectPieceBytes = 32 << 20;

class CopyQueue {
 public:
  explicit CopyQueue(size_t slot_bytes) : slot_bytes_(slot_bytes) {}

  // Jobs are numbered from 0. One without ranges lands at once.
  size_t submit(const CopyJob& job);
  // No more jobs come.
  void close();

  // The next piece, if one waits that can be taken: a staged one needs a slot. None after a failure.
  std::optional<CopyPiece> try_take(bool has_slot);
  // Waits for one; none when the queue is closed and empty, or after a failure.
  std::optional<CopyPiece> wait_take();
  // A piece is in place; its job lands with the last one.
  void complete(const CopyPiece& piece);
  // The first failure wins; nobody takes a piece after it.
  void fail(std::exception_ptr error) noexcept;
  void rethrow_failure() const;

  // A job that has landed and was not handed out yet.
  std::optional<size_t> poll_landed();
  // Waits for one. None when no more will come: everything was handed out, or a failure stopped the rest and all threads have ended.
  std::optional<size_t> wait_landed();

  void thread_started();
  void thread_ended();

 private:
  bool is_over_locked() const;
  const size_t slot_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable taken_;   // something for those who take
  std::condition_variable landed_;  // something for the one who waits
  std::deque<CopyPiece> pieces_;
  std::deque<size_t> pieces_left_;  // by job
  std::deque<size_t> landed_jobs_;
  size_t open_jobs_ = 0;
  std::exception_ptr failure_;
  int threads_ = 0;
  bool is_closed_ = false;
};

}  // namespace ebbtide
