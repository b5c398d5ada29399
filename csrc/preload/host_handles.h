#pragma once

#include "preload/allocate.h"

// Memory that a program makes with cuMemCreate and maps by itself. No part of a handle can lie elsewhere: where the device is full, all of it lies on the host, whatever the policy.
namespace ebbtide::preload {

// In place of memory on the device, which had no room. Fills *handle on success.
Overflowed create_on_host(const Request& request, const CUmemAllocationProp& properties,
                          CUmemGenericAllocationHandle* handle);

// What host handles are worth in the host budget, by handle; given back as they are released.
using HostHandles = MemoryMap<HostCharge>;
// Leaked on purpose: releases come after static destructors.
HostHandles& host_handles();

}  // namespace ebbtide::preload
