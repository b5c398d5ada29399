#include "driver/stream.h"

#include "base/log.h"

namespace ebbtide {
void report_if_lost(CUresult result) noexcept {
  if (!is_undone(result))
    log_line(LogLevel::kInfo, {"a stream or an event could not be destroyed: ", result_name(result)});
}

Stream Stream::create() {
  CUstream handle = nullptr;
  check(driver().cuStreamCreate(&handle, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  return Stream({handle});
}

Stream Stream::create_first() {
  // A priority beyond the greatest counts as the greatest.
  constexpr int kGreatest = -1000;
  CUstream handle = nullptr;
  check(driver().cuStreamCreateWithPriority(&handle, CU_STREAM_NON_BLOCKING, kGreatest), "cuStreamCreateWithPriority");
  return Stream({handle});
}

bool Stream::is_idle() const {
  const CUresult result = driver().cuStreamQuery(get());
  if (result != CUDA_ERROR_NOT_READY) check(result, "cuStreamQuery");
  return result == CUDA_SUCCESS;
}

void Stream::wait_for(const Event& event) const {
  check(driver().cuStreamWaitEvent(get(), event.get(), CU_EVENT_WAIT_DEFAULT), "cuStreamWaitEvent");
}

Event Event::create(unsigned flags) {
  CUevent handle = nullptr;
  check(driver().cuEventCreate(&handle, flags), "cuEventCreate");
  return Event({handle});
}

double Event::seconds_since(const Event& begin) const noexcept {
  const Driver& table = driver();
  float milliseconds = 0;
  if (table.cuEventElapsedTime == nullptr) return 0;
  if (table.cuEventElapsedTime(&milliseconds, begin.get(), get()) != CUDA_SUCCESS) return 0;
  return milliseconds / 1000.0;
}

}  // namespace ebbtide
