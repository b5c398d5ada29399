#pragma once

#include <cstddef>

#include "driver/driver.h"

// Memory that this process gave back and that the driver of AMD's devices has not freed yet (csrc/DESIGN.md, F51). What
// a device should have free is followed from the free bytes before each release; where it has less, the rest is late.
// By CUDA's names all of this does nothing.
namespace ebbtide::late_memory {

// Around a release of a device's memory, and after a handle was made. kOnHost: of no device.
void before_release(int device, size_t size_bytes) noexcept;
void after_refusal(int device, size_t size_bytes) noexcept;
void after_create(int device, size_t size_bytes) noexcept;

// Waits until the device has so many bytes free, if it will have them once nothing is late any more; 5 s at most from
// the last release on. Whether another try is worthwhile.
bool wait_for(int device, size_t size_bytes) noexcept;
// For tests that reset the simulator.
void forget() noexcept;

// attempt(), which makes handles of so many bytes on the device, and once more where they were late.
template <typename Attempt>
auto retry(int device, size_t size_bytes, const Attempt& attempt) {
  try {
    return attempt();
  } catch (const DriverError& error) {
    if (error.code != CUDA_ERROR_OUT_OF_MEMORY || !wait_for(device, size_bytes)) throw;
  }
  return attempt();
}

}  // namespace ebbtide::late_memory
