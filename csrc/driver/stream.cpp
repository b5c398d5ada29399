#include "driver/stream.h"

#include <string>

#include "base/log.h"

namespace ebbtide {
namespace {

// Streams and events hold no memory of the caller: one that can't be destroyed is reported and lost.
void report(const char* call, CUresult result) {
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
    log_line(LogLevel::kInfo, {call, " failed with ", result_name(result)});
}

}  // namespace

Stream Stream::create() {
  CUstream handle = nullptr;
  check(driver().cuStreamCreate(&handle, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  return Stream(handle);
}

Stream Stream::create_first() {
  if (driver().cuStreamCreateWithPriority == nullptr) return create();
  // A priority beyond the greatest counts as the greatest.
  constexpr int kGreatest = -1000;
  CUstream handle = nullptr;
  check(driver().cuStreamCreateWithPriority(&handle, CU_STREAM_NON_BLOCKING, kGreatest), "cuStreamCreateWithPriority");
  return Stream(handle);
}

Stream::~Stream() {
  if (handle_ != nullptr) report("cuStreamDestroy", driver_if_loaded()->cuStreamDestroy(handle_));
}

void Stream::wait_for(const Event& event) const {
  check(driver().cuStreamWaitEvent(handle_, event.get(), CU_EVENT_WAIT_DEFAULT), "cuStreamWaitEvent");
}

Event Event::create(unsigned flags) {
  CUevent handle = nullptr;
  check(driver().cuEventCreate(&handle, flags), "cuEventCreate");
  return Event(handle);
}

Event Event::create() { return create(CU_EVENT_DISABLE_TIMING); }

Event Event::create_timed() { return create(CU_EVENT_DEFAULT); }

double Event::seconds_since(const Event& begin) const noexcept {
  const Driver& table = driver();
  float milliseconds = 0;
  if (table.cuEventElapsedTime == nullptr) return 0;
  if (table.cuEventElapsedTime(&milliseconds, begin.handle_, handle_) != CUDA_SUCCESS) return 0;
  return milliseconds / 1000.0;
}

Event::~Event() {
  if (handle_ != nullptr) report("cuEventDestroy", driver_if_loaded()->cuEventDestroy(handle_));
}

}  // namespace ebbtide
