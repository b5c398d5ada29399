#pragma once

#include <cuda.h>

#include <cstddef>

namespace ebbtide::sim {

// Allocates memory on the current context's device, as cuMemAlloc and cuMemAllocManaged do. Takes the lock.
CUresult allocate_linear(CUdeviceptr& address, size_t size_bytes, bool is_managed);

}  // namespace ebbtide::sim
