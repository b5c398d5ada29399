// Stream capture: work given to a capturing stream is counted into a graph and never runs.
//
// Which calls a capture forbids follows the driver's documentation of cuThreadExchangeStreamCaptureMode, and for
// cuCtxSynchronize what was measured: in any thread, in every mode, it is refused and breaks every capture.
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

// How far each stream of a capture had come, at some point of one of them.
using Progress = std::map<uint64_t, uint64_t>;

struct Capture {
  uint64_t origin;
  uint64_t context;
  CUstreamCaptureMode mode;
  std::thread::id thread;
  bool is_invalidated = false;
  uint64_t node_count = 0;
  // Per stream that takes part: what it has seen of all of them.
  std::map<uint64_t, Progress> seen;

  void add_node(uint64_t stream);
  // Work given to `stream` from now on comes after `progress`.
  void wait_for(uint64_t stream, const Progress& progress);
  // Whether the origin has waited for everything that the other streams did.
  bool is_joined() const;
};

using CaptureRef = std::shared_ptr<Capture>;

class Captures {
 public:
  void add(CaptureRef capture) { active_.push_back(std::move(capture)); }
  void remove(const CaptureRef& capture);
  bool empty() const { return active_.empty(); }
  void invalidate_all();
  // Invalidates what a potentially unsafe call of this thread may not be made under, and says whether there was any.
  bool invalidate_for_unsafe_call(CUstreamCaptureMode thread_mode);
  void clear() { active_.clear(); }

 private:
  std::vector<CaptureRef> active_;
};

// Answers for the calling thread's mode whether a potentially unsafe call may go on.
CUresult refuse_unsafe_call(Lock& lock);

}  // namespace ebbtide::sim
