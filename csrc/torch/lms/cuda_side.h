// Large model support on a GPU, in whatever memory torch's caching allocator hands out. No header of CUDA is needed.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "torch/lms/device_side.h"

namespace ebbtide::lms {

// Whether the torch that this was compiled for has all that it needs.
bool has_cuda_side();
DeviceSide& cuda_side();
// From now on an allocation that does not fit calls reclaim, and is tried again as long as that frees anything. Throws
// std::runtime_error where torch's allocator can't be followed; nothing has changed then.
void follow_cuda_allocations(uint64_t (*reclaim)(c10::Device device, uint64_t wanted_bytes));
void leave_cuda_allocations();
// The most that torch's allocator may hold on a device: what Python has told torch.
void set_cuda_limit(int device, uint64_t limit_bytes);

}  // namespace ebbtide::lms
