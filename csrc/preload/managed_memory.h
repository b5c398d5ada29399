#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

// EBBTIDE_OVERFLOW=managed: CUDA managed memory when the device runs short. The driver moves its pages to the processor
// or device that touches them.
namespace ebbtide::preload {

// Charged to the host budget, since pages may move to the host. Throws StoreError.
CUresult allocate_managed(int device, uint64_t size_bytes, CUdeviceptr* address);
// Whether managed memory of ours begins here and was not freed. The program's own managed memory does not count.
bool is_managed(CUdeviceptr address) noexcept;
// Frees it once the device has finished with it. If that is not possible now the free is deferred, as the core does
// with memory that it places. Empty if the address is not ours.
std::optional<CUresult> free_managed(CUdeviceptr address);
// The driver has returned this address for new memory. So the memory recorded for it is gone without a free that we
// saw, for instance with its context.
void forget_managed(CUdeviceptr address) noexcept;

}  // namespace ebbtide::preload
