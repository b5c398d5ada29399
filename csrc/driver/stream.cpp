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

Event Event::create() {
  CUevent handle = nullptr;
  check(driver().cuEventCreate(&handle, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  return Event(handle);
}

Event::~Event() {
  if (handle_ != nullptr) report("cuEventDestroy", driver_if_loaded()->cuEventDestroy(handle_));
}

}  // namespace ebbtide
