#include "core/staging_pool.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "driver/context.h"
#include "policy/copy_plan.h"

namespace ebbtide {

StagingPool::Loan::~Loan() {
  if (ring_.staging != nullptr) pool_->give_back(std::move(ring_));
}

StagingPool::Ring StagingPool::make(int device, int slot_count) {
  const ContextScope scope(device);
  for (int slots = slot_count;; slots /= 2) {
    try {
      Ring ring;
      ring.claim = budget_.claim_uncharged(policy::kSlotBytes * static_cast<uint64_t>(slots),
                                           "the pinned ring between device and host");
      ring.staging = Staging::allocate(policy::kSlotBytes, slots);
      held_bytes_.fetch_add(ring.staging->size_bytes());
      return ring;
    } catch (const StoreError&) {
      if (slots == 1) throw;
    } catch (const DriverError& error) {
      if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
      if (slots == 1)
        throw StoreError(std::string("the system pins no memory for the ring between device and host: ") + error.what(),
                         {policy::kSlotBytes, 0, kUnlimited});
    }
  }
}

StagingPool::Loan StagingPool::borrow(int device, int thread_count) {
  const int wanted = thread_count * policy::kSlotsPerThread;
  Ring ring;
  {
    const std::lock_guard lock(mutex_);
    std::swap(ring, kept_);
  }
  if (ring.staging != nullptr && ring.staging->slot_count() >= wanted) return Loan(*this, std::move(ring));
  if (ring.staging != nullptr) {
    held_bytes_.fetch_sub(ring.staging->size_bytes());
    ring = Ring{};
  }
  return Loan(*this, make(device, wanted));
}

void StagingPool::give_back(Ring ring) noexcept {
  const std::lock_guard lock(mutex_);
  if (ring.staging->is_poisoned()) {
    // Never lent nor given back, and still in the books: the memory is there.
    try {
      poisoned_.push_back(std::move(ring));
    } catch (...) {
      log_line(LogLevel::kWarning, {"a pinned ring that can't be given back is lost from the host budget"});
    }
    return;
  }
  std::swap(ring, kept_);
  if (ring.staging != nullptr) held_bytes_.fetch_sub(ring.staging->size_bytes());
}

void StagingPool::trim() noexcept {
  Ring ring;
  const std::lock_guard lock(mutex_);
  std::swap(ring, kept_);
  if (ring.staging != nullptr) held_bytes_.fetch_sub(ring.staging->size_bytes());
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int choose_copy_threads(uint64_t bytes) {
  const char* text = std::getenv("EBBTIDE_COPY_THREADS");
  return policy::copy_threads(bytes, usable_cores(), text == nullptr ? 0 : std::atoi(text));
}

}  // namespace ebbtide
