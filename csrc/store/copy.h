#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "store/copy_engine.h"
#include "store/copy_queue.h"

// The way of bytes between device memory and a store: device <-> pinned ring <-> store, or device <-> store where the copy engine reaches the store by itself. Jobs are handed in while
// others are under way, so that mapping, unmapping and hashing overlap with the bus.
//
// A piece crosses the bus whole, in one stream with all others, and threads share what is to be done with it on this side.
namespace ebbtide {

class Copy {
 public:
  // Starts the threads; with one, or where the system starts none, the work is done in the calls below, in the context of the engine's device. The cut fits the engine's ring. must_have_threads: one at least where the system starts any, for a caller that waits for other things between the calls.
  Copy(CopyEngine& engine, CopyDirection direction, const RingCut& cut, bool must_have_threads = false);
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  // Takes back what has not begun, and waits until nothing is queued any more.
  ~Copy();

  // Jobs are numbered from 0. Their bytes move from now on. The ranges are read before the call returns.
  size_t submit(const CopyJob& job) { return queue_.submit(job); }
  // A job all of whose bytes are where they belong (on the device: visible to every later kernel), if there is one that was not told yet. Any order.
  std::optional<size_t> poll_landed();
  // Ends the submitting and waits for the next job; none after the last. Throws the first failure (DriverError, StoreError) after what landed was told and nothing is queued
  // any more: the jobs that were not told are then as they were at their source.
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
