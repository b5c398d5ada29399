#include "torch/cpu/region_memory.h"

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "api/ebbtide.h"
#include "torch/cpu/reclaim.h"

namespace ebbtide::cpu {

namespace {

// Tensors are on the simulator's first device, because torch's CPU has a single ordinal.
constexpr int32_t kDevice = 0;

// Of this thread's newest request that ebbtide refused.
thread_local ebbtide_error refusal = EBBTIDE_ERROR_INIT;

class SlotSource final : public SegmentSource {
 public:
  void* acquire(int32_t slot, size_t size_bytes) noexcept override {
    return ebbtide_slot_alloc_or_error(slot, size_bytes, nullptr, &refusal);
  }
  void release(void* address) noexcept override { ebbtide_slot_free(address); }
};

std::atomic<bool> is_child{false};

void before_fork() {
  region_memory().routing.lock();
  region_memory().arena.lock();
}

void after_fork_in_parent() {
  region_memory().arena.unlock();
  region_memory().routing.unlock();
}

void after_fork_in_child() {
  is_child.store(true, std::memory_order_relaxed);
  after_fork_in_parent();
}

std::string format_size(uint64_t size_bytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(size_bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0]); ++unit) value /= 1024;
  char text[64];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text;
}

}  // namespace

RegionMemory& region_memory() {
  static RegionMemory& memory = *new RegionMemory{*new Arena(*new SlotSource()), *new Routing()};
  [[maybe_unused]] static const int registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  return memory;
}

bool is_forked_child() { return is_child.load(std::memory_order_relaxed); }

std::string describe(const Pool& pool) {
  if (!pool.tag.empty()) return "tag '" + pool.tag + "'";
  for (const SegmentView& segment : region_memory().arena.snapshot(pool)) {
    ebbtide_allocation_info info{};
    bool is_found = false;
    if (ebbtide_find(segment.address, &is_found, &info, nullptr) == EBBTIDE_OK && is_found)
      return "tag '" + std::string(info.tag) + "'";
  }
  return "the region of slot " + std::to_string(pool.slot);
}

void forget_refusal() noexcept { refusal.status = EBBTIDE_OK; }

std::string out_of_memory_message(const Pool& pool, uint64_t request_bytes) {
  std::string message =
      "ebbtide: the simulated device is out of memory: " + describe(pool) + " asked for " + format_size(request_bytes);
  ebbtide_device_info info{};
  if (ebbtide_query_device(kDevice, &info, nullptr) == EBBTIDE_OK)
    message += "; " + format_size(info.free_bytes) + " of " + format_size(info.total_bytes) +
               " are free, and ebbtide holds " + format_size(info.held_bytes);
  if (const std::string reason = explain_reclaim(); !reason.empty()) message += "; " + reason;
  if (refusal.status == EBBTIDE_OK) return message + ". Pause or free what is not needed now.";
  message += std::string(". ") + refusal.message + ".";
  if (refusal.cause == EBBTIDE_CAUSE_DEVICE) message += " EBBTIDE_SIM_CAPACITY gives the simulator more.";
  // The refusal is neutral, and the reader of this uses Python. The core offers overflow where it is off.
  std::string advice;
  if (refusal.cause == EBBTIDE_CAUSE_DEVICE_LIMIT) advice = "saver.configure(device_limit=...)";
  if (refusal.cause == EBBTIDE_CAUSE_LMS_LIMIT)
    advice = "ebbtide.lms.limit = ...; for a checkpoint, torch.load(..., map_location=\"cpu\", mmap=True)";
  if (refusal.cause == EBBTIDE_CAUSE_DEVICE_MARGIN)
    advice = "saver.configure(device_margin=...), torch_memory_saver.memory_margin_bytes";
  if (std::strstr(refusal.message, "(overflow: split)") != nullptr)
    advice += std::string(advice.empty() ? "" : ", ") + "saver.region(..., overflow=\"split\")";
  return advice.empty() ? message : message + " In Python: " + advice + ".";
}

}  // namespace ebbtide::cpu
