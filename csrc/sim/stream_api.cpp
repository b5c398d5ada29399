// The exported functions of streams and events.
#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

constexpr unsigned kEventFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

// Looks the stream up and passes it to `use`, with the lock held.
template <typename Use>
CUresult with_stream(CUstream handle, Use use) {
  Lock lock(simulator().mutex);
  StreamRef stream;
  const CUresult wrong = simulator().streams.find(lock, handle, stream);
  return wrong != CUDA_SUCCESS ? wrong : use(lock, stream);
}

CUresult create_stream(CUstream* phStream, unsigned int Flags) {
  if (phStream == nullptr || (Flags != CU_STREAM_DEFAULT && Flags != CU_STREAM_NON_BLOCKING)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Lock lock(simulator().mutex);
  *phStream = handle_of<CUstream>(simulator().streams.add_stream(lock, Flags == CU_STREAM_DEFAULT));
  return CUDA_SUCCESS;
}

CUresult destroy_stream(CUstream hStream) {
  return with_stream(hStream,
                     [](Lock& lock, const StreamRef& stream) { return simulator().streams.destroy(lock, stream); });
}

CUresult synchronize_stream(CUstream hStream) {
  return with_stream(hStream,
                     [](Lock& lock, const StreamRef& stream) { return simulator().streams.synchronize(lock, stream); });
}

CUresult query_stream(CUstream hStream) {
  return with_stream(hStream,
                     [](Lock& lock, const StreamRef& stream) { return simulator().streams.query(lock, stream); });
}

CUresult wait_event(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  if (Flags > CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(hStream, [&](Lock& lock, const StreamRef& stream) {
    return simulator().streams.wait(lock, stream, id_of(hEvent));
  });
}

CUresult launch(CUstream hStream, CUhostFn fn, void* userData) {
  if (fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return with_stream(hStream, [&](Lock& lock, const StreamRef& stream) {
    return simulator().streams.submit(lock, stream, [fn, userData](Lock& held) {
      const Unlocked unlocked(held);
      const HostFunctionScope scope;
      fn(userData);
      return CUDA_SUCCESS;
    });
  });
}

CUresult create_event(CUevent* phEvent, unsigned int Flags) {
  if (phEvent == nullptr || (Flags & ~kEventFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  *phEvent = handle_of<CUevent>(simulator().streams.add_event(lock, (Flags & CU_EVENT_DISABLE_TIMING) == 0));
  return CUDA_SUCCESS;
}

CUresult destroy_event(CUevent hEvent) {
  Lock lock(simulator().mutex);
  if (simulator().streams.find_event(id_of(hEvent)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  simulator().streams.remove_event(id_of(hEvent));
  return CUDA_SUCCESS;
}

CUresult record_event(CUevent hEvent, CUstream hStream) {
  return with_stream(hStream, [&](Lock& lock, const StreamRef& stream) {
    return simulator().streams.record(lock, id_of(hEvent), stream);
  });
}

// Finds the point that the event stands for. Returns an error if the event may not be queried now.
CUresult point_of(Lock& lock, CUevent handle, Point& point, uint64_t& context) {
  const Event* event = simulator().streams.find_event(id_of(handle));
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (event->capture != nullptr) {
    event->capture->is_invalidated = true;
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  if (const CUresult refused = refuse_unsafe_call(lock); refused != CUDA_SUCCESS) return refused;
  point = event->recorded;
  context = event->context;
  return CUDA_SUCCESS;
}

CUresult sticky_error(uint64_t context) {
  const Context* found = simulator().contexts.find(context);
  return found == nullptr ? CUDA_SUCCESS : found->sticky_error;
}

CUresult query_event(CUevent hEvent) {
  Lock lock(simulator().mutex);
  Point point;
  uint64_t context = 0;
  if (const CUresult wrong = point_of(lock, hEvent, point, context); wrong != CUDA_SUCCESS) return wrong;
  const bool is_done = point.is_reached();
  if (!is_done) simulator().streams.run_one(lock, point);
  const CUresult sticky = sticky_error(context);
  if (sticky != CUDA_SUCCESS) return sticky;
  return is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult synchronize_event(CUevent hEvent) {
  Lock lock(simulator().mutex);
  Point point;
  uint64_t context = 0;
  if (const CUresult wrong = point_of(lock, hEvent, point, context); wrong != CUDA_SUCCESS) return wrong;
  simulator().streams.run_until(lock, point);
  return sticky_error(context);
}

CUresult elapsed_time(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  if (pMilliseconds == nullptr) return CUDA_ERROR_INVALID_HANDLE;  // not INVALID_VALUE, as the driver's page has it
  Lock lock(simulator().mutex);
  const Event* const start = simulator().streams.find_event(id_of(hStart));
  const Event* const end = simulator().streams.find_event(id_of(hEnd));
  for (const Event* event : {start, end}) {
    if (event == nullptr || !event->has_timing || event->time == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  }
  if (const CUresult sticky = sticky_error(end->context); sticky != CUDA_SUCCESS) return sticky;
  if (!start->time->has_value() || !end->time->has_value()) return CUDA_ERROR_NOT_READY;
  *pMilliseconds = std::chrono::duration<float, std::milli>(**end->time - **start->time).count();
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuStreamCreate(CUstream* phStream, unsigned int Flags) {
  EBBTIDE_SIM_FORWARD(cuStreamCreate, kContext, create_stream, phStream, Flags);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority) {
  // The driver replaces a priority out of range by the nearest one. The simulator has only one priority.
  EBBTIDE_SIM_FORWARD(
      cuStreamCreateWithPriority, kContext,
      [](CUstream* made, unsigned wanted, int) { return create_stream(made, wanted); }, phStream, flags, priority);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamDestroy(CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuStreamDestroy, kDriver, destroy_stream, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamSynchronize(CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuStreamSynchronize, kDriver | kNoCapture, synchronize_stream, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamQuery(CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuStreamQuery, kDriver | kNoCapture, query_stream, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  EBBTIDE_SIM_FORWARD(cuStreamWaitEvent, kDriver, wait_event, hStream, hEvent, Flags);
}

EBBTIDE_SIM_EXPORT CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
  EBBTIDE_SIM_FORWARD(cuLaunchHostFunc, kDriver, launch, hStream, fn, userData);
}

EBBTIDE_SIM_EXPORT CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags) {
  EBBTIDE_SIM_FORWARD(cuEventCreate, kContext, create_event, phEvent, Flags);
}

EBBTIDE_SIM_EXPORT CUresult cuEventDestroy(CUevent hEvent) {
  EBBTIDE_SIM_FORWARD(cuEventDestroy, kDriver, destroy_event, hEvent);
}

EBBTIDE_SIM_EXPORT CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuEventRecord, kDriver, record_event, hEvent, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuEventQuery(CUevent hEvent) {
  EBBTIDE_SIM_FORWARD(cuEventQuery, kDriver, query_event, hEvent);
}

EBBTIDE_SIM_EXPORT CUresult cuEventSynchronize(CUevent hEvent) {
  EBBTIDE_SIM_FORWARD(cuEventSynchronize, kDriver, synchronize_event, hEvent);
}

EBBTIDE_SIM_EXPORT CUresult cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  EBBTIDE_SIM_FORWARD(cuEventElapsedTime, kDriver, elapsed_time, pMilliseconds, hStart, hEnd);
}

EBBTIDE_SIM_PLAIN_NAME(cuStreamDestroy);
EBBTIDE_SIM_PLAIN_NAME(cuEventDestroy);
#if CUDA_VERSION >= 12080  // older headers have no suffix here
EBBTIDE_SIM_PLAIN_NAME(cuEventElapsedTime);
#endif
