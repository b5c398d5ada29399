#pragma once

#include <cstdint>
#include <string>

#include "core/state/core.h"

// malloc and free, and the entry of regions. None of them waits for an operation (invariant 12).
namespace ebbtide {

// The result of an allocation.
struct [[nodiscard]] AllocationResult {
  CUdeviceptr address = 0;
  // Where the address is 0: the memory would have to spill, and the policy says that the caller gives back its own
  // caches first. The same call, made again by the same thread, may spill.
  uint64_t room_bytes = 0;  // that the device had for it
  bool must_flush() const { return address == 0; }
};

// A new resident, zeroed allocation. Its size is rounded up to the granularity. stream: the caller's, for capture
// detection only; may be null. Throws OutOfMemory once nothing more can be given back.
AllocationResult try_allocate(Core& core, Tag& tag, const Policy& policy, int device, uint64_t size_bytes,
                              void* stream = nullptr);
// The same, but OutOfMemory also where the caller must flush first.
CUdeviceptr allocate(Core& core, Tag& tag, const Policy& policy, int device, uint64_t size_bytes,
                     void* stream = nullptr);

// Throws InvalidArgument for an address that no allocation begins at.
void deallocate(Core& core, CUdeviceptr address);
// The same, but false for such an address.
bool deallocate_if_ours(Core& core, CUdeviceptr address);

// The entry of a region.
LeaseInfo open_lease(Core& core, const std::string& tag_name, const std::string& holder);

}  // namespace ebbtide
