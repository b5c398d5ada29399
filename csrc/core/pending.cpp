#include "core/pending.h"

#include <chrono>
#include <cstdlib>

#include "base/error.h"
#include "base/log.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

// How many are under way, so that the process does not end in the middle of one: the driver would go while a thread still uses it. Leaked on purpose.
struct Running {
  std::mutex mutex;
  std::condition_variable changed;
  int count = 0;
};

Running& running() {
  static auto* const state = [] {
    std::atexit([] {
      if (is_forked_child()) return;
      Running& all = running();
      std::unique_lock lock(all.mutex);
      all.changed.wait(lock, [&] { return all.count == 0; });
    });
    return new Running;
  }();
  return *state;
}

void count_running(int change) noexcept {
  Running& all = running();
  const std::lock_guard lock(all.mutex);
  all.count += change;
  all.changed.notify_all();
}

constexpr std::chrono::microseconds kPollInterval{50};

}  // namespace

std::shared_ptr<PendingResume> PendingResume::start(std::unique_ptr<Operation> operation) {
  const std::shared_ptr<PendingResume> pending(new PendingResume(std::move(operation)));
  pending->arrivals_ = pending->operation_->map_ahead();
  count_running(1);
  try {
    pending->thread_ = std::thread([&moved = *pending] {
      moved.run();
      count_running(-1);
    });
  } catch (...) {
    // The system starts no thread: the bytes move now.
    count_running(-1);
    pending->run();
  }
  return pending;
}

void PendingResume::run() noexcept {
  Report report;
  std::exception_ptr error;
  try {
    report = std::move(operation_->commit().front());
  } catch (const std::exception& failure) {
    error = std::current_exception();
    // Nobody may ever ask.
    log_line(LogLevel::kError, {"a resume in the background failed: ", failure.what()});
  }
  operation_.reset();
  arrivals_->end();
  const std::lock_guard lock(mutex_);
  report_ = std::move(report);
  error_ = error;
  is_over_ = true;
  ended_.notify_all();
}

PendingResume::~PendingResume() {
  if (thread_.joinable()) thread_.join();
}

bool PendingResume::is_over() const {
  const std::lock_guard lock(mutex_);
  return is_over_;
}

bool PendingResume::is_ready(const AddressRange& range) const { return is_over() || arrivals_->has_arrived(range); }

Report PendingResume::wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return is_over_; });
  if (error_ != nullptr) std::rethrow_exception(error_);
  return report_;
}

void PendingResume::wait_here(const std::vector<AddressRange>& ranges) const {
  std::unique_lock lock(mutex_);
  const auto are_there = [&] {
    if (is_over_) return true;
    if (ranges.empty()) return false;
    for (const AddressRange& range : ranges) {
      if (!arrivals_->has_arrived(range)) return false;
    }
    return true;
  };
  while (!are_there()) ended_.wait_for(lock, kPollInterval);
}

void PendingResume::stream_wait(int device, CUstream stream, const std::vector<AddressRange>& ranges) {
  if (is_over()) return;
  const ContextScope scope(device);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  if (status != CU_STREAM_CAPTURE_STATUS_NONE)
    throw StateError("a capturing stream can't wait for a resume: wait for it before the capture begins");
  if (!waits_on_device.load() || !Arrivals::can_stream_wait()) return wait_here(ranges);
  try {
    if (ranges.empty()) arrivals_->stream_wait_for_end(stream);
    for (const AddressRange& range : ranges) arrivals_->stream_wait(stream, range);
  } catch (const DriverError& error) {
    // The call is there and the device has no such waits (some virtual machines).
    if (error.code != CUDA_ERROR_NOT_SUPPORTED) throw;
    wait_here(ranges);
  }
}

}  // namespace ebbtide
