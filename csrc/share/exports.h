#pragma once

#include <vector>

#include "core/state/core.h"

namespace ebbtide {

struct ExportedPiece {
  uint64_t size_bytes;
  Descriptor file;
};

// The memory behind the allocation that contains the address, in order. It is lent until end_export() was called as
// often: an operation takes it away only once it has asked the borrowers. Never waits for operations. Throws
// InvalidArgument (no allocation), BusyError, StateError (not on the device, or not exportable), DriverError.
std::vector<ExportedPiece> export_memory(Core& core, CUdeviceptr address);
// Does nothing where the allocation is gone.
void end_export(Core& core, CUdeviceptr address);

// A borrower would refuse: operations that would take the memory away are refused, until as many no longer do. Does
// nothing where the allocation is gone.
void refuse_moves(Core& core, CUdeviceptr address, bool refuses);

// Operations pass the allocation by. Its chunks have handles of their own afterwards.
// Throws as above, and OutOfMemory where there is no room to give it handles of its own.
void keep(Core& core, CUdeviceptr address);
void end_keep(Core& core, CUdeviceptr address);

}  // namespace ebbtide
