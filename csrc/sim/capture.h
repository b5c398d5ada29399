// Stream capture: work that is given to a capturing stream is counted into a graph and never runs.
//
// The set of forbidden calls follows the driver's documentation of cuThreadExchangeStreamCaptureMode. The rule for
// cuCtxSynchronize was measured: in any thread and in every mode, it is refused and breaks every capture.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "sim/lock.h"

namespace ebbtide::sim {

struct Stream;

// For each stream of a capture, how many of its nodes precede some point of one of them.
using Progress = std::map<uint64_t, uint64_t>;

struct Capture {
  uint64_t origin;
  uint64_t context;
  CUstreamCaptureMode mode;
  std::thread::id thread;
  bool is_invalidated = false;
  uint64_t node_count = 0;
  // For each stream that takes part: the progress of all streams that it has seen.
  std::map<uint64_t, Progress> seen;

  void add_node(uint64_t stream);
  // Orders the work that `stream` gets from now on after `progress`.
  void wait_for(uint64_t stream, const Progress& progress);
  // Whether the origin has waited for all work of the other streams.
  bool is_joined() const;
};

using CaptureRef = std::shared_ptr<Capture>;

class Captures {
 public:
  void add(CaptureRef capture) { active_.push_back(std::move(capture)); }
  void remove(const CaptureRef& capture);
  bool empty() const { return active_.empty(); }
  void invalidate_all();
  // Invalidates the captures that forbid a potentially unsafe call by this thread. Returns whether there was any.
  bool invalidate_for_unsafe_call(CUstreamCaptureMode thread_mode);
  void clear() { active_.clear(); }

 private:
  std::vector<CaptureRef> active_;
};

// Checks a potentially unsafe call against the calling thread's capture mode. If a capture forbids it, the capture is
// invalidated and the answer is an error.
CUresult refuse_unsafe_call(Lock& lock);

}  // namespace ebbtide::sim
