#include "preload/hook_call.h"
#include "preload/known_captures.h"

// Tells the core of the program's captures. The core waits for the device at a free and at a pause, and that would
// break a capture (invariant 9).
using namespace ebbtide::preload;

namespace {

CUstream per_thread(CUstream stream) { return stream == nullptr ? CU_STREAM_PER_THREAD : stream; }

template <typename Native>
CUresult begin(CUstream stream, Native&& native) {
  known_captures().begin(stream);  // before the capture begins, so that no operation that would break it is under way
  const CUresult result = native();
  if (result != CUDA_SUCCESS) known_captures().end(stream);
  return result;
}

template <typename Native>
CUresult end(CUstream stream, Native&& native) {
  const CUresult result = native();
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  // Some errors end a capture, and some do not. After success another thread may have begun the next one.
  const auto ask = result != CUDA_SUCCESS ? real<&cuStreamIsCapturing>() : nullptr;
  const bool goes_on =
      ask != nullptr && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
  if (!goes_on) known_captures().end(stream);
  return result;
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return call_hook<&cuStreamBeginCapture_v2>(
      "cuStreamBeginCapture",
      [&](auto real_function) { return begin(stream, [&] { return real_function(stream, mode); }); }, stream, mode);
}

EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return call_hook<&cuStreamBeginCapture_v2_ptsz>(
      "cuStreamBeginCapture",
      [&](auto real_function) { return begin(per_thread(stream), [&] { return real_function(stream, mode); }); },
      stream, mode);
}

#if CUDA_VERSION >= 12030
EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                                         const CUgraphEdgeData* edges, size_t count,
                                                         CUstreamCaptureMode mode) {
  return call_hook<&cuStreamBeginCaptureToGraph>(
      "cuStreamBeginCaptureToGraph",
      [&](auto real_function) {
        return begin(stream, [&] { return real_function(stream, graph, nodes, edges, count, mode); });
      },
      stream, graph, nodes, edges, count, mode);
}

EBBTIDE_HOOK_EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                                              const CUgraphEdgeData* edges, size_t count,
                                                              CUstreamCaptureMode mode) {
  return call_hook<&cuStreamBeginCaptureToGraph_ptsz>(
      "cuStreamBeginCaptureToGraph",
      [&](auto real_function) {
        return begin(per_thread(stream), [&] { return real_function(stream, graph, nodes, edges, count, mode); });
      },
      stream, graph, nodes, edges, count, mode);
}
#endif

EBBTIDE_HOOK_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return call_hook<&cuStreamEndCapture>(
      "cuStreamEndCapture",
      [&](auto real_function) { return end(stream, [&] { return real_function(stream, graph); }); }, stream, graph);
}

EBBTIDE_HOOK_EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
  return call_hook<&cuStreamEndCapture_ptsz>(
      "cuStreamEndCapture",
      [&](auto real_function) { return end(per_thread(stream), [&] { return real_function(stream, graph); }); }, stream,
      graph);
}

// A stream that goes takes its capture with it.
EBBTIDE_HOOK_EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
  return call_hook<&cuStreamDestroy_v2>(
      "cuStreamDestroy",
      [&](auto real_function) {
        // Before the call: another thread may receive the same handle at once, and begin a capture.
        const bool was_capturing = known_captures().forget(stream);
        const CUresult result = real_function(stream);
        if (!was_capturing) return result;
        if (result == CUDA_SUCCESS) {
          known_captures().end_forgotten();
        } else {
          known_captures().put_back(stream);
        }
        return result;
      },
      stream);
}
