#pragma once

#include "preload/allocate.h"

// Memory that a program makes with cuMemCreate and maps itself. A handle can't be split between device and host: if the
// device is full, all of it goes to the host, whatever the policy.
namespace ebbtide::preload {

// Makes a handle on the host because the device had no room. Fills *handle on success.
Overflowed create_on_host(const Request& request, const CUmemAllocationProp& properties,
                          CUmemGenericAllocationHandle* handle);

// The host budget's charge of each host handle, given back at its release.
using HostHandles = MemoryMap<HostCharge>;
// Leaked on purpose: releases come after static destructors.
HostHandles& host_handles();

}  // namespace ebbtide::preload
