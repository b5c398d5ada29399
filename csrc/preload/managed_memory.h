#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

// EBBTIDE_OVERFLOW=managed: CUDA managed memory where the device gets short. The driver moves its pages by what touches them.
namespace ebbtide::preload {

// Counted against the host budget, where pages may end up. Throws StoreError.
CUresult allocate_managed(int device, uint64_t size_bytes, CUdeviceptr* address);
// Whether it begins here, and was not freed. Managed memory of the program's own is none of ours.
bool is_managed(CUdeviceptr address) noexcept;
// Frees it once the device is done with it; what can't be freed now is put off, as the core does with what it places. None where it is not ours.
std::optional<CUresult> free_managed(CUdeviceptr address);
// The driver has given this address anew: what we held for it went in a way that nobody told us of, with its context say.
void forget_managed(CUdeviceptr address) noexcept;

}  // namespace ebbtide::preload
