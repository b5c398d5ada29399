#include "core/operation/pending.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "core/state/exit.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

constexpr std::chrono::microseconds kPollInterval{50};

}  // namespace

std::shared_ptr<PendingResume> PendingResume::start(std::unique_ptr<Operation> operation) {
  BackgroundWork work;
  std::shared_ptr<PendingResume> pending(new PendingResume(std::move(operation)));
  pending->arrivals_ = pending->operation_->launch();
  if (pending->arrivals_ == nullptr) {
    pending->run();
    return pending;
  }
  try {
    std::thread([pending, work = std::move(work)]() mutable {
      DeferredFrees& frees = pending->operation_->core().deferred_frees;
      pending->run();
      pending.reset();
      // Memory that was freed meanwhile may wait for any work of the device. No caller waits for this thread.
      if (frees.count() > 0) frees.drain();
    }).detach();
  } catch (...) {
    // The system starts no thread: this one waits for the end.
    pending->run();
  }
  return pending;
}

void PendingResume::run() noexcept {
  std::exception_ptr error;
  try {
    Report report = std::move(operation_->commit().front());
    const std::lock_guard lock(mutex_);
    report_ = std::move(report);
  } catch (const std::exception& failure) {
    error = std::current_exception();
    // The program may never ask for the result.
    log_line(LogLevel::kError, {"a resume in the background failed: ", failure.what()});
  }
  operation_.reset();
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);  // so that the last caller that asks lets it go
  is_over_ = true;
  arrivals_.reset();
  ended_.notify_all();
}

std::shared_ptr<const Arrivals> PendingResume::arrivals() const {
  const std::lock_guard lock(mutex_);
  return arrivals_;
}

bool PendingResume::is_over() const {
  const std::lock_guard lock(mutex_);
  return is_over_;
}

bool PendingResume::have_arrived(const std::vector<AddressRange>& ranges) const {
  const auto coming = arrivals();
  if (coming == nullptr) return true;
  return !ranges.empty() && std::all_of(ranges.begin(), ranges.end(),
                                        [&](const AddressRange& range) { return coming->have_arrived(range); });
}

bool PendingResume::is_ready(const AddressRange& range) const { return have_arrived({range}); }

Report PendingResume::wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return is_over_; });
  if (error_ != nullptr) std::rethrow_exception(error_);
  return report_;
}

void PendingResume::wait_here(const std::vector<AddressRange>& ranges) const {
  while (!have_arrived(ranges)) std::this_thread::sleep_for(kPollInterval);
}

void PendingResume::stream_wait(int device, CUstream stream, const std::vector<AddressRange>& ranges) {
  const auto coming = arrivals();
  if (coming == nullptr) return;
  const ContextScope scope(device);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  if (status != CU_STREAM_CAPTURE_STATUS_NONE)
    throw StateError("a capturing stream can't wait for a resume: wait for it before the capture begins");
  try {
    coming->stream_wait(stream, ranges);
  } catch (const DriverError& error) {
    // The device has no such waits (some virtual machines).
    if (error.code != CUDA_ERROR_NOT_SUPPORTED) throw;
    wait_here(ranges);
  }
}

}  // namespace ebbtide
