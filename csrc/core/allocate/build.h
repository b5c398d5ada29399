#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/state/core.h"

namespace ebbtide {

// The request of an allocation's caller. The size is a multiple of the granularity.
struct AllocationRequest {
  Tag& tag;
  const Policy& policy;
  int device;
  uint64_t size_bytes;
};

// A resident, zeroed allocation, not registered yet: device memory in front, then the host memory that is handed over
// (none: all of it lies on the device). The device's context is current. Throws OutOfMemory, and DriverError (also with
// CUDA_ERROR_OUT_OF_MEMORY); host_memory is untouched where device memory was refused.
std::shared_ptr<Allocation> build_allocation(Core& core, const AllocationRequest& request,
                                             std::vector<HostPool::Handle>& host_memory);

}  // namespace ebbtide
