#pragma once

#include <cstddef>

#include "driver/driver.h"

// Memory that this process gave back and that the driver of AMD's devices has not freed yet (csrc/DESIGN.md, F51).
namespace ebbtide::late_memory {

// kOnHost: of no device, which is nothing.
void note(int device, size_t size_bytes) noexcept;
// Waits until the device has so many bytes free. False, mostly at once, where what is late would not be enough or does
// not come.
bool wait_for(int device, size_t size_bytes);

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
