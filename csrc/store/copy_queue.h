#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>

#include "driver/driver.h"
#include "kernels/block_types.h"
#include "store/ring_room.h"
#include "store/store.h"

// The state that the threads of one copy share: how far each piece is between its source and its target, the next step
// for a thread, the completed jobs, and whether to stop. Makes no driver calls. Thread-safe.
namespace ebbtide {

enum class CopyDirection { kToStore, kToDevice };

// A part of a job that moves. Bytes between parts stay unchanged.
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
  // To the store: not null receives, for each block of the chunk that moves, the digest of the bytes that the store
  // got, whatever the device writes meanwhile. Ranges, pieces and parts are whole blocks then.
  kernels::Digest* digests = nullptr;
  kernels::Digest seed = {};
  // Queues work in the engine's stream, behind the copy of the last byte, in the context of its device. The job lands
  // after it. May be empty, and is not called for a job without ranges.
  std::function<void()> then = {};
};

// How a copy uses the ring.
struct RingCut {
  int threads = 1;
  size_t ring_bytes = 0;     // of its beginning
  size_t piece_bytes = 0;    // at most this goes over the bus at once; at most the ring
  size_t part_bytes = 0;     // at most this of a piece is one thread's at once
  size_t request_bytes = 0;  // the same for backups that are not in memory
};

inline constexpr size_t kDirectPieceBytes = 32 << 20;

// At most piece_bytes of a job, or kDirectPieceBytes if the copy engine accesses the backup directly.
struct CopyPiece {
  size_t job = 0;
  CUdeviceptr device_address = 0;
  Backup* backup = nullptr;
  size_t offset = 0;  // in the backup
  size_t size_bytes = 0;
  kernels::Digest* digests = nullptr;  // of its first block on
  kernels::Digest seed = {};
  bool is_direct() const { return backup->direct() != nullptr; }
};

// A piece that has begun: it has room in the ring (unless it is direct) and an event.
struct Flight {
  // In this order to the device, and with the parts after the bus to the store. A direct piece has parts only where its
  // bytes are digested.
  enum class Stage { kParts, kReady, kLaunching, kOnBus, kDone };
  CopyPiece piece;
  size_t ring_offset = 0;
  size_t event = 0;
  size_t part_bytes = 0;
  size_t parts = 0;
  size_t parts_taken = 0;
  size_t parts_done = 0;
  Stage stage = Stage::kReady;
};

// A thread's next step, which it does outside of the queue and then reports to it.
struct CopyStep {
  enum class Kind {
    kLaunch,  // put it on the bus, then launched()
    kPart,    // copy this part between ring and store, then part_done()
    kAwait,   // wait for its event, then landed()
    kNothing,
    kEnd,  // nothing more will come
  };
  Kind kind = Kind::kNothing;
  Flight* flight = nullptr;
  size_t offset = 0;  // of the part, in the piece
  size_t size_bytes = 0;
};

class CopyQueue {
 public:
  // events: the number of pieces at once. Throws InvalidArgument for a cut with which nothing would ever move.
  CopyQueue(CopyDirection direction, const RingCut& cut, size_t events);

  // Jobs are numbered from 0. A job without ranges lands at once.
  size_t submit(const CopyJob& job);
  // No more jobs come.
  void close();

  // may_wait: waits until there is a step, or the end. Without it, the caller does all steps between other work: to
  // await a piece that has no parts, and so nothing left to do, he is told only where others wait for its place, or
  // when no more jobs come.
  CopyStep next(bool may_wait);
  void launched(Flight& flight);
  void part_done(Flight& flight);
  void landed(Flight& flight);
  // After the copy of a piece was queued, and before its event is recorded: work that must follow now, since no piece
  // of its job is left to be queued. Else null.
  const std::function<void()>* queued(const Flight& flight);
  // The first failure counts. No step begins after it.
  void fail(std::exception_ptr error) noexcept;
  void rethrow_failure() const;
  // Whether pieces may be on the bus that were not seen to land.
  bool is_bus_used() const;
  // The copies can't be waited for. Backups that the copy engine itself may still read or write are never freed.
  void abandon_direct_backups() noexcept;

  // A job that has landed and was not returned yet.
  std::optional<size_t> poll_landed();
  // Waits for a job. None when no more will come: all jobs were returned, or a failure stopped the rest and all threads
  // have ended.
  std::optional<size_t> wait_landed();

  // Of all that take steps beside the caller, as one.
  void threads_started();
  void threads_ended();

 private:
  void begin_pieces_locked();
  bool try_begin_locked(const CopyPiece& piece);
  CopyStep find_step_locked(bool may_await_whole);
  void finish_locked(Flight& flight);
  bool is_over_locked() const;
  static bool is_on_bus(const Flight& flight);

  struct Job {
    size_t pieces_left;      // that have not landed
    size_t pieces_unqueued;  // that the bus was not given
    std::function<void()> then;
  };

  const CopyDirection direction_;
  const RingCut cut_;
  const size_t events_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // there is a step for a worker
  std::condition_variable landed_;   // a job has landed, for the waiting thread
  std::deque<CopyPiece> pieces_;     // that have not begun
  std::deque<Flight> flights_;       // in the order of the ring; the first is not done
  RingRoom room_;
  size_t next_event_ = 0;
  size_t direct_under_way_ = 0;
  bool is_bus_awaited_ = false;  // by one thread at most
  std::deque<Job> jobs_;
  std::deque<size_t> landed_jobs_;
  size_t open_jobs_ = 0;
  std::exception_ptr failure_;
  bool has_threads_ = false;
  bool is_closed_ = false;
};

}  // namespace ebbtide
