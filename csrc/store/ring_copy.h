#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "store/copy_engine.h"
#include "store/copy_queue.h"

// Moves bytes between device memory and a store: device <-> pinned ring <-> store, or device <-> store if the copy
// engine can access the store directly. Jobs are submitted while others run, so that mapping, unmapping and hashing
// overlap with the bus. A piece crosses the bus whole, and all pieces use one stream. Threads share a piece's host
// side.
namespace ebbtide {

class RingCopy {
 public:
  // Starts the threads. With one thread, or if the system starts none, the calls below do the work, in the context of
  // the engine's device. The cut fits the engine's ring. must_have_threads starts at least one if the system permits,
  // for a caller that waits for other things between the calls.
  RingCopy(CopyEngine& engine, CopyDirection direction, const RingCut& cut, bool must_have_threads = false);
  RingCopy(const RingCopy&) = delete;
  RingCopy& operator=(const RingCopy&) = delete;
  // Drops the jobs that have not begun, and waits until nothing is queued any more.
  ~RingCopy();

  // Jobs are numbered from 0. Their bytes move from now on. The ranges are read before the call returns.
  size_t submit(const CopyJob& job) { return queue_.submit(job); }
  // A job whose bytes have all arrived (on the device: visible to every later kernel) and that was not reported yet, in
  // any order. None if there is no such job.
  std::optional<size_t> poll_landed();
  // Ends the submitting and waits for the next job; none after the last. Throws the first failure (DriverError,
  // StoreError) after all arrived jobs have been reported and nothing is queued any more. The source of the jobs that
  // were not reported is then unchanged.
  std::optional<size_t> finish_next();

 private:
  class Worker;
  void start_threads(int thread_count);
  bool has_threads() const { return runner_.joinable(); }

  CopyEngine& engine_;
  CopyQueue queue_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::jthread runner_;
};

}  // namespace ebbtide
