#pragma once

#include <vector>

#include "core/state/core.h"

namespace ebbtide {

// A descriptor of a piece of memory; it holds the memory, in whatever process it is.
class ExportedFile {
 public:
  ExportedFile(int file, uint64_t size_bytes) : file_(file), size_bytes_(size_bytes) {}
  ExportedFile(ExportedFile&& other) noexcept : file_(other.give()), size_bytes_(other.size_bytes_) {}
  ExportedFile& operator=(ExportedFile&&) = delete;
  ~ExportedFile();

  uint64_t size_bytes() const { return size_bytes_; }
  int give() noexcept {
    const int file = file_;
    file_ = -1;
    return file;
  }

 private:
  int file_;
  uint64_t size_bytes_;
};

// The memory behind the allocation that contains the address, in order. It stays where it is, and an operation that
// would take it away is refused, until end_export() was called as often. Waits while an operation has the tag. Throws
// InvalidArgument (no allocation), StateError (not on the device, or not exportable), DriverError.
std::vector<ExportedFile> export_memory(Core& core, CUdeviceptr address);
// Does nothing where the allocation is gone.
void end_export(Core& core, CUdeviceptr address);

// The same without descriptors: operations pass the allocation by. Its chunks have handles of their own afterwards.
// Throws as above, and OutOfMemory where there is no room to give it handles of its own.
void keep(Core& core, CUdeviceptr address);
void end_keep(Core& core, CUdeviceptr address);

}  // namespace ebbtide
