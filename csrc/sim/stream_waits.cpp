// The functions that wait for, poll, or order streams.
#include "sim/simulator.h"
#include "sim/streams.h"

namespace ebbtide::sim {
namespace {

CUresult do_nothing(Lock&) { return CUDA_SUCCESS; }

}  // namespace

CUresult Streams::synchronize(Lock& lock, const StreamRef& stream) {
  if (stream->capture != nullptr) {
    stream->capture->is_invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (stream->is_legacy) {
    if (const CUresult refused = use_legacy(stream->context); refused != CUDA_SUCCESS) return refused;
  }
  std::vector<Point> points = implicit_dependencies(stream);
  if (!stream->is_legacy) points.clear();
  points.push_back({stream, stream->submitted});
  for (const Point& point : points) run_until(lock, point);
  return sticky_error(stream->context);
}

CUresult Streams::synchronize_context(Lock& lock, uint64_t context) {
  if (!captures_.empty()) {
    captures_.invalidate_all();
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  drain(lock, context);
  return sticky_error(context);
}

CUresult Streams::query(Lock& lock, const StreamRef& stream) {
  if (stream->capture != nullptr) {
    stream->capture->is_invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  std::vector<Point> points;
  if (stream->is_legacy) {
    if (const CUresult refused = use_legacy(stream->context); refused != CUDA_SUCCESS) return refused;
    points = implicit_dependencies(stream);
  }
  points.push_back({stream, stream->submitted});
  for (const Point& point : points) {
    if (point.is_reached()) continue;
    run_one(lock, point);
    const CUresult sticky = sticky_error(stream->context);
    return sticky == CUDA_SUCCESS ? CUDA_ERROR_NOT_READY : sticky;
  }
  return sticky_error(stream->context);
}

CUresult Streams::destroy(Lock& lock, const StreamRef& stream) {
  if (stream->is_legacy) return CUDA_ERROR_INVALID_HANDLE;
  if (const CaptureRef capture = stream->capture; capture != nullptr) {
    capture->is_invalidated = true;
    if (capture->origin == stream->id) drop_capture(capture);
  }
  const Point tail{stream, stream->submitted};
  run_until_blocked(lock, tail);
  streams_.erase(stream->id);
  if (!tail.is_reached()) orphans_.push_back(stream);
  return CUDA_SUCCESS;
}

CUresult Streams::record(Lock& lock, uint64_t event_id, const StreamRef& stream) {
  Event* event = find_event(event_id);
  if (event == nullptr || event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture != nullptr) {
    if (stream->capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture = stream->capture;
    event->progress = stream->capture->seen[stream->id];
    return CUDA_SUCCESS;
  }
  if (stream->is_legacy) {
    if (const CUresult refused = use_legacy(stream->context); refused != CUDA_SUCCESS) return refused;
  }
  event->capture = nullptr;
  event->recorded = {stream, stream->submitted + 1};
  event->time = std::make_shared<RecordTime>();
  return submit(lock, stream, [time = event->time](Lock&) {
    *time = std::chrono::steady_clock::now();
    return CUDA_SUCCESS;
  });
}

CUresult Streams::wait(Lock& lock, const StreamRef& stream, uint64_t event_id) {
  const Event* event = find_event(event_id);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture != nullptr) {
    if (event->capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture != nullptr && stream->capture != event->capture) {
      event->capture->is_invalidated = stream->capture->is_invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream->capture = event->capture;
    stream->capture->wait_for(stream->id, event->progress);
    return CUDA_SUCCESS;
  }
  if (stream->capture != nullptr) {
    // A captured stream may not depend on work outside its capture.
    stream->capture->is_invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  std::vector<Point> after;
  if (!event->recorded.is_reached()) after.push_back(event->recorded);
  return submit(lock, stream, do_nothing, std::move(after));
}

}  // namespace ebbtide::sim
