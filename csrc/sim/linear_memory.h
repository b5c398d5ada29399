#pragma once

#include <cuda.h>

#include <cstddef>

namespace ebbtide::sim {

// Memory of the current context's device, as cuMemAlloc and cuMemAllocManaged give it; takes the lock.
CUresult allocate_linear(CUdeviceptr& address, size_t size_bytes, bool is_managed);

}  // namespace ebbtide::sim
