#pragma once

#include <cuda.h>

#include <cstdint>

// EBBTIDE_OVERFLOW=managed: CUDA managed memory where the device gets short. The driver moves its pages by what touches them.
namespace ebbtide::preload {

// Counted against the host budget, where pages may end up. Throws StoreError.
CUresult allocate_managed(int device, uint64_t size_bytes, CUdeviceptr* address);

}  // namespace ebbtide::preload
