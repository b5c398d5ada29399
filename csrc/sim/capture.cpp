#include "sim/capture.h"

#include <algorithm>

#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool is_mode(CUstreamCaptureMode mode) {
  return mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
         mode == CU_STREAM_CAPTURE_MODE_RELAXED;
}

}  // namespace

void Capture::add_node(uint64_t stream) {
  ++node_count;
  ++seen[stream][stream];
}

void Capture::wait_for(uint64_t stream, const Progress& progress) {
  Progress& own = seen[stream];
  for (const auto& [other, count] : progress) own[other] = std::max(own[other], count);
}

bool Capture::is_joined() const {
  const auto own = seen.find(origin);
  return std::all_of(seen.begin(), seen.end(), [&](const auto& entry) {
    const auto& [stream, progress] = entry;
    if (stream == origin) return true;
    const auto done = progress.find(stream);
    const uint64_t needed = done == progress.end() ? 0 : done->second;
    if (needed == 0) return true;
    if (own == seen.end()) return false;
    const auto known = own->second.find(stream);
    return known != own->second.end() && known->second >= needed;
  });
}

void Captures::remove(const CaptureRef& capture) { std::erase(active_, capture); }

void Captures::invalidate_all() {
  for (const CaptureRef& capture : active_) capture->is_invalidated = true;
}

bool Captures::invalidate_for_unsafe_call(CUstreamCaptureMode mode) {
  if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL && mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) return false;
  bool is_any = false;
  for (const CaptureRef& capture : active_) {
    const bool is_own =
        capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool is_global = mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!is_own && !is_global) continue;
    capture->is_invalidated = true;
    is_any = true;
  }
  return is_any;
}

CUresult refuse_unsafe_call(Lock&) {
  const bool is_refused = simulator().streams.captures().invalidate_for_unsafe_call(thread_mode);
  return is_refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

bool Streams::is_blocking_capture_active(uint64_t context) const {
  const auto streams = all_of(context);
  return std::any_of(streams.begin(), streams.end(),
                     [](const StreamRef& stream) { return stream->is_blocking && stream->capture != nullptr; });
}

CUresult Streams::use_legacy(uint64_t context) {
  if (!is_blocking_capture_active(context)) return CUDA_SUCCESS;
  for (const StreamRef& stream : all_of(context)) {
    if (stream->is_blocking && stream->capture != nullptr) stream->capture->is_invalidated = true;
  }
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

CUresult Streams::begin_capture(Lock&, const StreamRef& stream, CUstreamCaptureMode mode) {
  if (!is_mode(mode)) return CUDA_ERROR_INVALID_VALUE;
  if (stream->is_legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->origin = stream->id;
  capture->context = stream->context;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  stream->capture = capture;
  captures_.add(std::move(capture));
  return CUDA_SUCCESS;
}

void Streams::drop_capture(const CaptureRef& capture) {
  for (const StreamRef& stream : all_of(0)) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
  captures_.remove(capture);
}

CUresult Streams::end_capture(Lock&, const StreamRef& stream, uint64_t& graph) {
  const CaptureRef capture = stream->capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream->id) {
    capture->is_invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  drop_capture(capture);
  // A call from the wrong thread is an error, and ends the capture all the same.
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  if (capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!capture->is_joined()) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  graph = simulator().next_id();
  graphs_.insert(graph);
  return CUDA_SUCCESS;
}

CUresult Streams::capture_status(const StreamRef& stream, CUstreamCaptureStatus& status) {
  if (stream->is_legacy && is_blocking_capture_active(stream->context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  if (stream->capture == nullptr) {
    status = CU_STREAM_CAPTURE_STATUS_NONE;
  } else {
    status = stream->capture->is_invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  }
  return CUDA_SUCCESS;
}

namespace {

CUresult begin(CUstream hStream, CUstreamCaptureMode mode) {
  Lock lock(simulator().mutex);
  StreamRef stream;
  if (const CUresult wrong = simulator().streams.find(lock, hStream, stream); wrong != CUDA_SUCCESS) return wrong;
  return simulator().streams.begin_capture(lock, stream, mode);
}

CUresult end(CUstream hStream, CUgraph* phGraph) {
  if (phGraph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  StreamRef stream;
  if (const CUresult wrong = simulator().streams.find(lock, hStream, stream); wrong != CUDA_SUCCESS) return wrong;
  uint64_t graph = 0;
  const CUresult result = simulator().streams.end_capture(lock, stream, graph);
  *phGraph = handle_of<CUgraph>(graph);
  return result;
}

CUresult is_capturing(CUstream hStream, CUstreamCaptureStatus* captureStatus) {
  if (captureStatus == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  StreamRef stream;
  if (const CUresult wrong = simulator().streams.find(lock, hStream, stream); wrong != CUDA_SUCCESS) return wrong;
  return simulator().streams.capture_status(stream, *captureStatus);
}

CUresult exchange_mode(CUstreamCaptureMode* mode) {
  // Neither the driver nor the simulator refuses an unknown mode. It forbids nothing.
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::swap(thread_mode, *mode);
  return CUDA_SUCCESS;
}

CUresult destroy_graph(CUgraph hGraph) {
  Lock lock(simulator().mutex);
  return simulator().streams.remove_graph(id_of(hGraph)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuStreamBeginCapture(CUstream hStream, CUstreamCaptureMode mode) {
  EBBTIDE_SIM_FORWARD(cuStreamBeginCapture, kDriver, begin, hStream, mode);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
  EBBTIDE_SIM_FORWARD(cuStreamEndCapture, kDriver, end, hStream, phGraph);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus) {
  EBBTIDE_SIM_FORWARD(cuStreamIsCapturing, kDriver, is_capturing, hStream, captureStatus);
}

EBBTIDE_SIM_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  EBBTIDE_SIM_FORWARD(cuThreadExchangeStreamCaptureMode, kDriver, exchange_mode, mode);
}

EBBTIDE_SIM_EXPORT CUresult cuGraphDestroy(CUgraph hGraph) {
  EBBTIDE_SIM_FORWARD(cuGraphDestroy, kDriver, destroy_graph, hGraph);
}

EBBTIDE_SIM_PLAIN_NAME(cuStreamBeginCapture);
