#include "sim/streams.h"

#include <algorithm>
#include <chrono>
#include <new>

#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

// The interval at which a waiting thread checks a number.
constexpr std::chrono::microseconds kPollInterval{50};

StreamRef make_stream(uint64_t context) {
  auto stream = std::make_shared<Stream>();
  stream->id = simulator().next_id();
  stream->context = context;
  return stream;
}

}  // namespace

CUresult Streams::find(Lock& lock, CUstream handle, StreamRef& stream) {
  const uint64_t context = current_context(lock);
  if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    if (const CUresult state = current_context_state(lock); state != CUDA_SUCCESS) return state;
    stream = handle == CU_STREAM_PER_THREAD ? thread_stream(context) : legacy_stream(context);
    return CUDA_SUCCESS;
  }
  const auto found = streams_.find(id_of(handle));
  if (found == streams_.end()) return CUDA_ERROR_INVALID_HANDLE;
  stream = found->second;
  return sticky_error(stream->context);
}

StreamRef Streams::legacy_stream(uint64_t context) {
  StreamRef& stream = legacy_[context];
  if (stream == nullptr) {
    stream = make_stream(context);
    stream->is_legacy = true;
  }
  return stream;
}

StreamRef Streams::thread_stream(uint64_t context) {
  StreamRef& stream = per_thread_[{context, std::this_thread::get_id()}];
  if (stream == nullptr) {
    stream = make_stream(context);
    stream->is_blocking = true;
  }
  return stream;
}

Event* Streams::find_event(uint64_t id) {
  const auto found = events_.find(id);
  return found == events_.end() ? nullptr : &found->second;
}

uint64_t Streams::add_stream(Lock& lock, bool is_blocking) {
  const StreamRef stream = make_stream(current_context(lock));
  stream->is_blocking = is_blocking;
  streams_[stream->id] = stream;
  return stream->id;
}

uint64_t Streams::add_event(Lock& lock, bool has_timing) {
  const uint64_t id = simulator().next_id();
  events_[id] = {.context = current_context(lock),
                 .has_timing = has_timing,
                 .recorded = {},
                 .time = nullptr,
                 .capture = nullptr,
                 .progress = {}};
  return id;
}

std::vector<StreamRef> Streams::all_of(uint64_t context) const {
  std::vector<StreamRef> found;
  const auto add = [&](const StreamRef& stream) {
    if (context == 0 || stream->context == context) found.push_back(stream);
  };
  for (const auto& [id, stream] : streams_) add(stream);
  for (const auto& [id, stream] : legacy_) add(stream);
  for (const auto& [id, stream] : per_thread_) add(stream);
  for (const StreamRef& stream : orphans_) add(stream);
  return found;
}

std::vector<Point> Streams::implicit_dependencies(const StreamRef& stream) {
  std::vector<Point> points;
  if (stream->is_blocking) {
    const StreamRef legacy = legacy_stream(stream->context);
    points.push_back({legacy, legacy->submitted});
  } else if (stream->is_legacy) {
    for (const StreamRef& other : all_of(stream->context)) {
      if (other->is_blocking) points.push_back({other, other->submitted});
    }
  }
  std::erase_if(points, [](const Point& point) { return point.is_reached(); });
  return points;
}

CUresult Streams::submit(Lock& lock, const StreamRef& stream, Work work, std::vector<Point> after, Readiness is_ready) {
  if (stream->capture != nullptr) {
    if (stream->capture->is_invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture->add_node(stream->id);
    return CUDA_SUCCESS;
  }
  if (stream->is_legacy) {
    if (const CUresult refused = use_legacy(stream->context); refused != CUDA_SUCCESS) return refused;
  }
  for (Point& point : implicit_dependencies(stream)) after.push_back(std::move(point));
  stream->queue.push_back({std::move(work), std::move(after), std::move(is_ready)});
  const Point own{stream, ++stream->submitted};
  if (mode_ == AsyncMode::kEager || (mode_ == AsyncMode::kRandom && random_() % 2 == 0)) run_until_blocked(lock, own);
  return CUDA_SUCCESS;
}

void Streams::run_front(Lock& lock, const StreamRef& stream) {
  const Item item = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->is_running = true;
  // Work of a context with a sticky error is discarded, not run.
  CUresult result = CUDA_SUCCESS;
  try {
    if (sticky_error(stream->context) == CUDA_SUCCESS) result = item.work(lock);
  } catch (const std::bad_alloc&) {
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (result != CUDA_SUCCESS) {
    if (Context* context = simulator().contexts.find(stream->context)) context->sticky_error = result;
  }
  stream->is_running = false;
  // A reset during the item has already counted everything as completed.
  if (stream->completed < stream->submitted) ++stream->completed;
  std::erase_if(orphans_, [](const StreamRef& orphan) { return orphan->completed == orphan->submitted; });
  simulator().work_done.notify_all();
}

bool Streams::is_front_ready(Lock& lock, const Stream& stream) const {
  const Item& front = stream.queue.front();
  return front.is_ready == nullptr || sticky_error(stream.context) != CUDA_SUCCESS || front.is_ready(lock);
}

bool Streams::advance(Lock& lock, const Point& point) {
  const StreamRef stream = point.stream;
  if (stream->is_running) {
    simulator().work_done.wait(lock);
    return true;
  }
  Point first_unmet;
  for (const Point& after : stream->queue.front().after) {
    if (!after.is_reached()) first_unmet = after;
  }
  if (first_unmet.stream != nullptr) return advance(lock, first_unmet);
  if (!is_front_ready(lock, *stream)) return false;
  run_front(lock, stream);
  return true;
}

bool Streams::run_any(Lock& lock) {
  for (const StreamRef& stream : all_of(0)) {
    if (stream->is_running || stream->queue.empty()) continue;
    const auto& after = stream->queue.front().after;
    if (!std::all_of(after.begin(), after.end(), [](const Point& point) { return point.is_reached(); })) continue;
    if (!is_front_ready(lock, *stream)) continue;
    run_front(lock, stream);
    return true;
  }
  return false;
}

void Streams::run_until(Lock& lock, const Point& point) {
  while (!point.is_reached()) {
    if (!advance(lock, point) && !run_any(lock)) simulator().work_done.wait_for(lock, kPollInterval);
  }
}

void Streams::run_until_blocked(Lock& lock, const Point& point) {
  while (!point.is_reached() && advance(lock, point)) {
  }
}

void Streams::run_one(Lock& lock, const Point& point) {
  if (point.is_reached() || point.stream->is_running) return;
  for (const Point& after : point.stream->queue.front().after) {
    if (!after.is_reached()) {
      const Point unmet = after;
      run_one(lock, unmet);
      return;
    }
  }
  if (is_front_ready(lock, *point.stream)) {
    run_front(lock, point.stream);
  } else {
    run_any(lock);
  }
}

CUresult Streams::sticky_error(uint64_t context) const {
  const Context* found = simulator().contexts.find(context);
  return found == nullptr ? CUDA_SUCCESS : found->sticky_error;
}

void Streams::drain(Lock& lock, uint64_t context) {
  std::vector<Point> tails;
  for (const StreamRef& stream : all_of(context)) tails.push_back({stream, stream->submitted});
  for (const Point& tail : tails) run_until(lock, tail);
}

void Streams::run_available(Lock& lock) {
  std::vector<Point> tails;
  for (const StreamRef& stream : all_of(0)) tails.push_back({stream, stream->submitted});
  for (const Point& tail : tails) run_until_blocked(lock, tail);
  // Items that were blocked above may have become ready through items that ran after them.
  while (run_any(lock)) {
  }
}

void Streams::drop_context(Lock& lock, uint64_t context) {
  drain(lock, context);
  std::erase_if(streams_, [&](const auto& entry) { return entry.second->context == context; });
  std::erase_if(per_thread_, [&](const auto& entry) { return entry.second->context == context; });
  std::erase_if(events_, [&](const auto& entry) { return entry.second.context == context; });
  legacy_.erase(context);
}

void Streams::set_mode(AsyncMode mode, uint64_t seed) {
  mode_ = mode;
  random_.seed(seed);
}

uint64_t Streams::queued_items() const {
  uint64_t total = 0;
  for (const StreamRef& stream : all_of(0)) total += stream->submitted - stream->completed;
  return total;
}

void Streams::reset() {
  for (const StreamRef& stream : all_of(0)) {
    stream->queue.clear();
    stream->completed = stream->submitted;
  }
  streams_.clear();
  legacy_.clear();
  per_thread_.clear();
  orphans_.clear();
  events_.clear();
  graphs_.clear();
  captures_.clear();
  set_mode(AsyncMode::kLate, 0);
}

}  // namespace ebbtide::sim
