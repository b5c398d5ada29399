#include <algorithm>
#include <mutex>
#include <vector>

#include "core/state/core.h"
#include "core/state/shortage.h"
#include "preload/hook_call.h"

// Tells the core of the program's captures. The core waits for the device at a free and at a pause, and that would
// break a capture (invariant 9).
namespace ebbtide::preload {
namespace {

// The streams on which the program captures now. Each is counted by the core's capture gate.
class KnownCaptures {
 public:
  // Waits for the running operation. Several threads may use the same handle for their per-thread streams.
  void begin(CUstream stream) {
    CaptureGate& gate = Core::instance().capture_gate;
    gate.begin_capture();
    try {
      const std::lock_guard lock(mutex_);
      streams_.push_back(stream);
    } catch (...) {
      gate.end_capture();
      throw;
    }
  }
  // Does nothing if no capture had begun on it. Runs the deferred frees.
  void end(CUstream stream) noexcept {
    if (forget(stream)) end_forgotten();
  }
  // The same in two steps, for calls that may fail in between. Another thread may begin a capture on a forgotten stream
  // under the same handle. False: no capture had begun on it, and nothing needs to be done.
  bool forget(CUstream stream) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = std::find(streams_.begin(), streams_.end(), stream);
    if (found == streams_.end()) return false;
    streams_.erase(found);
    return true;
  }
  void put_back(CUstream stream) noexcept {  // undoes forget()
    try {
      const std::lock_guard lock(mutex_);
      streams_.push_back(stream);
    } catch (...) {
      // Another thread has taken the place, and there is no memory for another one: its end is not waited for.
      end_forgotten();
    }
  }
  void end_forgotten() noexcept {
    Core::instance().capture_gate.end_capture();
    give_back_caches(Core::instance());
  }

 private:
  std::mutex mutex_;
  std::vector<CUstream> streams_;
};

// Leaked on purpose: captures may end after static destructors.
KnownCaptures& known_captures() {
  static auto* const instance = new KnownCaptures;
  return *instance;
}

template <auto kFunction, typename... Arguments>
CUresult begin(CUstream stream, Arguments... arguments) noexcept {
  return call_hook<kFunction>(
      [&](auto native) {
        // Before the capture begins, so that no operation that would break it is under way.
        known_captures().begin(stream_of<kFunction>(stream));
        const CUresult result = native();
        if (result != CUDA_SUCCESS) known_captures().end(stream_of<kFunction>(stream));
        return result;
      },
      stream, arguments...);
}

template <auto kFunction>
CUresult end(CUstream stream, CUgraph* graph) noexcept {
  return call_hook<kFunction>(
      [&](auto native) {
        const CUresult result = native();
        const CUstream captured = stream_of<kFunction>(stream);
        CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
        // Some errors end a capture, and some do not. After success another thread may have begun the next one.
        const auto ask = result != CUDA_SUCCESS ? real<&cuStreamIsCapturing>() : nullptr;
        const bool goes_on =
            ask != nullptr && ask(captured, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
        if (!goes_on) known_captures().end(captured);
        return result;
      },
      stream, graph);
}

}  // namespace
}  // namespace ebbtide::preload

using namespace ebbtide::preload;

EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return begin<&cuStreamBeginCapture_v2>(stream, mode);
}

EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return begin<&cuStreamBeginCapture_v2_ptsz>(stream, mode);
}

#if CUDA_VERSION >= 12030
EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                                         const CUgraphEdgeData* edges, size_t count,
                                                         CUstreamCaptureMode mode) {
  return begin<&cuStreamBeginCaptureToGraph>(stream, graph, nodes, edges, count, mode);
}

EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                                              const CUgraphEdgeData* edges, size_t count,
                                                              CUstreamCaptureMode mode) {
  return begin<&cuStreamBeginCaptureToGraph_ptsz>(stream, graph, nodes, edges, count, mode);
}
#endif

EBBTIDE_HOOK_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return end<&cuStreamEndCapture>(stream, graph);
}

EBBTIDE_HOOK_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
  return end<&cuStreamEndCapture_ptsz>(stream, graph);
}

// A stream that goes takes its capture with it.
EBBTIDE_HOOK_EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
  return call_hook<&cuStreamDestroy_v2>(
      [&](auto native) {
        // Before the call: another thread may receive the same handle at once, and begin a capture.
        const bool was_capturing = known_captures().forget(stream);
        const CUresult result = native();
        if (was_capturing && result == CUDA_SUCCESS) known_captures().end_forgotten();
        if (was_capturing && result != CUDA_SUCCESS) known_captures().put_back(stream);
        return result;
      },
      stream);
}
