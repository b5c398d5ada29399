#include "lms/copies.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "core/state/core.h"
#include "driver/context.h"

namespace ebbtide::lms {
namespace {

// The context has taken its work along.
bool is_gone(CUresult result) {
  return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_DEINITIALIZED;
}

[[noreturn]] void throw_capturing(int device) {
  throw StateError("a stream capture is under way on device " + std::to_string(device) +
                   ", or in this thread: large model support can't copy then; keep it off while graphs are captured");
}

}  // namespace

// --- CopyStream ---

CopyStream::CopyStream(int device, CopyDirection direction, EvictedMemory& memory)
    : device_(device), direction_(direction), memory_(memory), stream_(Stream::create()), ready_(Event::create()) {}

void CopyStream::queue(CUdeviceptr on_device, std::byte* on_host, size_t size_bytes, CUstream after_stream,
                       const CopyEvents& events) {
  const std::lock_guard lock(order_);
  if (is_poisoned()) {
    throw StateError("an earlier copy of device " + std::to_string(device_) +
                     " could not be waited for: it may still run, so no other can begin");
  }
  ready_.record(after_stream);
  stream_.wait_for(ready_);
  events.begin.record(stream_);
  const Driver& table = driver();
  const bool is_to_host = direction_ == CopyDirection::kToHost;
  const char* call = is_to_host ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync";
  CUresult result = is_to_host ? table.cuMemcpyDtoHAsync(on_host, on_device, size_bytes, stream_.get())
                               : table.cuMemcpyHtoDAsync(on_device, on_host, size_bytes, stream_.get());
  if (result == CUDA_SUCCESS) {
    call = "cuEventRecord";
    result = table.cuEventRecord(events.end.get(), stream_.get());
  }
  if (result == CUDA_SUCCESS) return;
  // Nobody could tell when the copy is complete.
  settle(on_host);
  check(result, call, "size=" + std::to_string(size_bytes));
}

void CopyStream::settle(const void* on_host) {
  CUresult result = CUDA_ERROR_UNKNOWN;
  try {
    const ContextScope scope(device_);
    const RelaxedCaptureMode relaxed;  // as in Copy::wait()
    result = driver().cuStreamSynchronize(stream_.get());
  } catch (const DriverError& error) {
    result = static_cast<CUresult>(error.code);
  }
  if (result == CUDA_SUCCESS || is_gone(result)) return;
  is_poisoned_ = true;
  memory_.abandon(on_host);
  throw DriverError(std::string("a copy failed, and can't be waited for: cuStreamSynchronize failed with ") +
                        result_name(result) + ". It may use its memory for ever, which must not be reused",
                    "cuStreamSynchronize", result, "");
}

CopyEvents CopyStream::take_events() {
  {
    const std::lock_guard lock(events_mutex_);
    if (!idle_events_.empty()) {
      CopyEvents events = std::move(idle_events_.back());
      idle_events_.pop_back();
      return events;
    }
    idle_events_.reserve(++made_events_);
  }
  Event begin = Event::create_timed(), end = Event::create_timed();
  return {std::move(begin), std::move(end), Event::create_timed()};
}

void CopyStream::give_back(CopyEvents events) noexcept {
  const std::lock_guard lock(events_mutex_);
  idle_events_.push_back(std::move(events));
}

// --- Copy ---

bool Copy::is_done() noexcept {
  if (is_done_.load()) return true;
  const auto permit = gate_.try_enter();
  if (!permit) return false;
  try {
    const ContextScope scope(stream_.device());
    const RelaxedCaptureMode relaxed;  // captures that ebbtide does not know of stay whole as well
    if (driver().cuEventQuery(events_.end.get()) != CUDA_SUCCESS) return false;
  } catch (...) {
    return false;
  }
  is_done_ = true;
  return true;
}

void Copy::wait() {
  if (is_done_.load()) return;
  const ContextScope scope(stream_.device());
  // With this, waiting breaks no capture (F20). To wait for the end of a capture could last for ever: its thread may be
  // the one that waits.
  const RelaxedCaptureMode relaxed;
  const CUresult result = driver().cuEventSynchronize(events_.end.get());
  if (!is_gone(result)) check(result, "cuEventSynchronize");
  is_done_ = true;
}

void Copy::order_before(CUstream stream) {
  const ContextScope scope(stream_.device());
  if (is_capture_visible(stream_.device(), stream)) throw_capturing(stream_.device());
  if (is_done_.load()) return;
  // Where that fails, as in a stream of another device, nobody learns how long the stream waits.
  if (!is_awaited_) is_awaited_ = driver().cuEventRecord(events_.reached.get(), stream) == CUDA_SUCCESS;
  check(driver().cuStreamWaitEvent(stream, events_.end.get(), CU_EVENT_WAIT_DEFAULT), "cuStreamWaitEvent");
}

CopySeconds Copy::end() {
  try {
    wait();
  } catch (const DriverError&) {
    stream_.settle(on_host_);
  }
  CopySeconds seconds;
  try {
    const ContextScope scope(stream_.device());
    const RelaxedCaptureMode relaxed;
    seconds.copying = events_.end.seconds_since(events_.begin);
    // Of a stream that has not come so far, the driver tells nothing: it does not wait.
    if (is_awaited_) seconds.waited = std::max(0.0, events_.end.seconds_since(events_.reached));
  } catch (const DriverError&) {
    // The copy is complete all the same.
  }
  stream_.give_back(std::move(events_));
  return seconds;
}

// --- Copies ---

CopyStream& Copies::stream_of(int device, CopyDirection direction) {
  const std::lock_guard lock(mutex_);
  auto& stream = streams_[{device, direction}];
  if (stream == nullptr) stream = std::make_unique<CopyStream>(device, direction, memory_);
  return *stream;
}

std::unique_ptr<Copy> Copies::begin(int device, void* destination, const void* source, size_t size_bytes,
                                    CopyDirection direction, CUstream after_stream) {
  const bool is_to_host = direction == CopyDirection::kToHost;
  const void* const on_host = is_to_host ? destination : source;
  const void* const on_device = is_to_host ? source : destination;
  const ContextScope scope(device);
  const auto permit = gate_.try_enter();
  if (!permit || is_capture_visible(device, after_stream)) throw_capturing(device);
  CopyStream& stream = stream_of(device, direction);
  auto copy = std::make_unique<Copy>(stream, gate_, on_host);
  // A copy to the device only reads the host memory.
  stream.queue(reinterpret_cast<CUdeviceptr>(on_device), static_cast<std::byte*>(const_cast<void*>(on_host)),
               size_bytes, after_stream, copy->events_);
  return copy;
}

Copies& copies() {
  static auto* const made = new Copies(Core::instance().capture_gate, evicted_memory());
  return *made;
}

}  // namespace ebbtide::lms
