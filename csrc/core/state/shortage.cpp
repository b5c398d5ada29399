#include "core/state/shortage.h"

#include "base/bytes.h"
#include "driver/context.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {

bool give_back_caches(Core& core, bool may_wait) noexcept {
  const bool has_ended = may_wait && core.registry.ahead_steps.wait(AheadSteps::Which::kWithFreedMemory);
  const size_t undos = deferred_undos::count();
  if (undos > 0) {
    const auto permit = core.capture_gate.try_enter();
    deferred_undos::retry(permit.has_value());
  }
  const bool has_freed = core.deferred_frees.drain(may_wait);
  return has_ended || has_freed || deferred_undos::count() < undos;
}

bool is_device_shortage(const Error& error) noexcept {
  if (const auto* const from_driver = dynamic_cast<const DriverError*>(&error))
    return from_driver->code == CUDA_ERROR_OUT_OF_MEMORY;
  return dynamic_cast<const OutOfMemory*>(&error) != nullptr;
}

bool is_shortage(const Error& error) noexcept {
  return is_device_shortage(error) || dynamic_cast<const StoreError*>(&error) != nullptr;
}

uint64_t free_device_bytes(int device) noexcept {
  try {
    const ContextScope scope(device);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    return driver().cuMemGetInfo(&free_bytes, &total_bytes) == CUDA_SUCCESS ? free_bytes : 0;
  } catch (...) {
    return 0;
  }
}

void rethrow_shortage(const DriverError& error, const DeviceBudget& budget, int device, uint64_t requested_bytes,
                      const std::string& purpose) {
  if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw error;
  const uint64_t free_bytes = free_device_bytes(device);
  throw OutOfMemory("device " + std::to_string(device) + " has too little memory for " + purpose + ": " +
                        format_bytes(requested_bytes) + " wanted, " + format_bytes(free_bytes) +
                        " free on the device itself (device_limit: " + format_bytes(budget.limit_bytes()) +
                        "). Pause another tag, or free memory of this or other processes",
                    device, {requested_bytes, free_bytes, budget.limit_bytes()}, Cause::kDevice);
}

}  // namespace ebbtide
