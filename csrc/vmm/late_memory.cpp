#include "vmm/late_memory.h"

#include <chrono>
#include <mutex>
#include <thread>

#include "driver/context.h"

namespace ebbtide::late_memory {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLateness{5};  // as long as vLLM waits
constexpr std::chrono::milliseconds kPollInterval{5};

struct GivenBack {
  Clock::time_point last{};
  size_t size_bytes = 0;  // since the last time that nothing was given back for so long
};
std::mutex mutex;
GivenBack given_back[kMaxDevices];

// Of the device, at this moment.
size_t late_bytes(int device) {
  const std::lock_guard lock(mutex);
  const GivenBack& given = given_back[device_index(device)];
  return Clock::now() - given.last < kLateness ? given.size_bytes : 0;
}

}  // namespace

void note(int device, size_t size_bytes) noexcept {
  if (device < 0 || !speaks_hip()) return;
  const std::lock_guard lock(mutex);
  GivenBack& given = given_back[device];
  const Clock::time_point now = Clock::now();
  given = {now, size_bytes + (now - given.last < kLateness ? given.size_bytes : 0)};
}

bool wait_for(int device, size_t size_bytes) {
  if (!speaks_hip()) return false;
  const ContextScope scope(device);
  size_t free_bytes = 0, total_bytes = 0;
  bool is_late = false;
  while (driver().cuMemGetInfo(&free_bytes, &total_bytes) == CUDA_SUCCESS) {
    if (free_bytes >= size_bytes) return is_late;
    is_late = size_bytes - free_bytes <= late_bytes(device);
    if (!is_late) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return false;
}

}  // namespace ebbtide::late_memory
