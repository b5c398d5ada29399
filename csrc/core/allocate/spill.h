#pragma once

#include <cstdint>
#include <memory>

#include "core/allocate/build.h"

// Allocations that may lie on the host where the device has too little, as their policy says.
namespace ebbtide {

struct SpillResult {
  std::shared_ptr<Allocation> allocation;  // null: it would have to spill, and may not
  uint64_t room_bytes = 0;                 // that the device had for it
};

// As build_allocation(). may_spill: false returns no allocation in place of one that lies on the host.
SpillResult build_spilling(Core& core, const AllocationRequest& request, bool may_spill);

}  // namespace ebbtide
