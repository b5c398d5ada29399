#pragma once

#include "preload/allocate.h"

// Memory that a program makes with cuMemCreate and maps itself. A handle can't be split between device and host: if the
// device is full, all of it goes to the host, whatever the policy.
namespace ebbtide::preload {

// In place of memory on the device, which had no room. Fills *handle on success.
Overflowed create_on_host(const Request& request, const CUmemAllocationProp& properties,
                          CUmemGenericAllocationHandle* handle);

// What host handles are worth in the host budget, by handle; given back as they are released.
using HostHandles = MemoryMap<HostCharge>;
// Leaked on purpose: releases come after static destructors.
HostHandles& host_handles();

}  // namespace ebbtide::preload
