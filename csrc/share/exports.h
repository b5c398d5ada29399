#pragma once

#include <vector>

#include "core/state/core.h"

namespace ebbtide {

struct ExportedPiece {
  uint64_t size_bytes;
  Descriptor file;
};

// The memory behind the allocation that contains the address, in order. It stays where it is, and an operation that
// would take it away is refused, until end_export() was called as often. Waits while an operation has the tag. Throws
// InvalidArgument (no allocation), StateError (not on the device, or not exportable), DriverError.
std::vector<ExportedPiece> export_memory(Core& core, CUdeviceptr address);
// Does nothing where the allocation is gone.
void end_export(Core& core, CUdeviceptr address);

// The same without descriptors: operations pass the allocation by. Its chunks have handles of their own afterwards.
// Throws as above, and OutOfMemory where there is no room to give it handles of its own.
void keep(Core& core, CUdeviceptr address);
void end_keep(Core& core, CUdeviceptr address);

}  // namespace ebbtide
