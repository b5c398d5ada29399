#include "vmm/late_memory.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>

#include "driver/context.h"

namespace ebbtide::late_memory {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLateness{5};  // as long as vLLM waits
constexpr std::chrono::milliseconds kPollInterval{5};

struct Expected {
  Clock::time_point last_release{};
  size_t free_bytes = 0;  // once nothing is late any more; means nothing long after the last release

  bool is_recent() const { return last_release != Clock::time_point{} && Clock::now() - last_release < kLateness; }
};
constinit std::mutex mutex;
constinit Expected all[kMaxDevices]{};

bool is_followed(int device) noexcept { return device >= 0 && speaks_hip(); }

// None where the driver does not say.
std::optional<size_t> free_bytes_of(int device) noexcept {
  try {
    const ContextScope scope(device);
    size_t free_bytes = 0, total_bytes = 0;
    if (driver().cuMemGetInfo(&free_bytes, &total_bytes) == CUDA_SUCCESS) return free_bytes;
  } catch (...) {
    // Nothing is late then.
  }
  return std::nullopt;
}

Expected expected(int device) {
  const std::lock_guard lock(mutex);
  return all[device];
}

}  // namespace

void before_release(int device, size_t size_bytes) noexcept {
  if (!is_followed(device)) return;
  const auto free_bytes = free_bytes_of(device);
  if (!free_bytes) return;
  const std::lock_guard lock(mutex);
  Expected& known = all[device];
  const size_t before = known.is_recent() ? std::max(known.free_bytes, *free_bytes) : *free_bytes;
  known = {Clock::now(), before + size_bytes};
}

void after_refusal(int device, size_t size_bytes) noexcept { after_create(device, size_bytes); }

void after_create(int device, size_t size_bytes) noexcept {
  if (!is_followed(device)) return;
  const std::lock_guard lock(mutex);
  all[device].free_bytes -= std::min(all[device].free_bytes, size_bytes);
}

void forget() noexcept {
  const std::lock_guard lock(mutex);
  std::fill(std::begin(all), std::end(all), Expected{});
}

bool wait_for(int device, size_t size_bytes) noexcept {
  if (!is_followed(device)) return false;
  const Expected known = expected(device);  // what comes later is not waited for
  if (!known.is_recent()) return false;
  while (known.is_recent()) {
    const auto free_bytes = free_bytes_of(device);
    if (!free_bytes || known.free_bytes < size_bytes) return false;
    if (*free_bytes >= size_bytes) return true;
    std::this_thread::sleep_for(kPollInterval);
  }
  return false;
}

}  // namespace ebbtide::late_memory
