#pragma once

#include <cuda.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/allocate/allocator.h"

// Memory that hooks allocate from the core. The program sees it as an allocation of the driver.
namespace ebbtide::preload {

struct Request;

struct PlacedMemory {
  CUdeviceptr start = 0;
  size_t size_bytes = 0;  // as requested by the program
  int device = -1;
};

// The calling thread's context, or null if it is the device's primary one. A program that made its own context has its
// work there, and the core itself waits only for the primary one.
CUcontext own_context(int device);
// Whether the caller is torch's allocator, which frees its cache and asks again when it is refused. It does not do so
// while the tag of a pauseable program is away, because a pool is then open for all threads.
bool will_flush();
// Memory from the core instead of the driver: with the request's tag, else a spill. Throws OutOfMemory, StoreError,
// DriverError.
AllocationResult place(const Request& request);
// Frees it once the device has finished with it. False if it is not the core's.
bool free_placed(CUdeviceptr address);
// The core's allocation that contains this address, whether a hook or the program made it.
std::optional<PlacedMemory> find_placed(CUdeviceptr address);
// A sentence about memory that find_placed() finds: it can't be shared with another process, and what to do.
std::string why_not_shared(CUdeviceptr address);

}  // namespace ebbtide::preload
