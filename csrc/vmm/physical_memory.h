#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

#include "vmm/deferred_undos.h"
#include "vmm/descriptor.h"
#include "vmm/host_location.h"

namespace ebbtide {

// Used in place of a device's ordinal for host memory.
inline constexpr int kOnHost = -1;

// What is asked of a handle on a device.
struct HandleKind {
  HandleKind(uint64_t bytes, bool exportable = false) : size_bytes(bytes), is_exportable(exportable) {}
  uint64_t size_bytes;
  bool is_exportable;
  friend auto operator<=>(const HandleKind&, const HandleKind&) = default;
};

// Owns one driver handle: physical memory without an address. It may be released while it is mapped; the mapping then
// keeps the memory.
//
// Relied on: the memory of a new handle reads as zeros, on the device and on the host (csrc/DESIGN.md, F5). Not on HIP
// (F49): is_made_clear() says so.
class PhysicalMemory : public Owner<Undo> {
 public:
  PhysicalMemory() = default;
  // At most so many bytes behind one handle (csrc/DESIGN.md, F50).
  static uint64_t most_bytes() noexcept;
  static bool is_made_clear() noexcept;
  // On the device. size_bytes is a multiple of granularity(device). exportable: export_file() may be called. Throws
  // DriverError, with the code CUDA_ERROR_OUT_OF_MEMORY if there is too little.
  static PhysicalMemory create_on_device(size_t size_bytes, int device, bool is_exportable = false);
  // The memory behind a file of export_file() in this or another process, which the caller closes. Throws DriverError.
  static PhysicalMemory import_file(int file, size_t size_bytes, int device);
  // The same, for memory that changes hands: it can be exported in its turn. The driver exports no imports, so this
  // keeps the descriptor (csrc/DESIGN.md, F45).
  static PhysicalMemory take_over(Descriptor file, size_t size_bytes, int device);
  // On the host. size_bytes is a multiple of the location's granularity. The kernel charges this memory to no cgroup
  // (csrc/DESIGN.md, F15), so the caller has claimed it from the host budget.
  static PhysicalMemory create_on_host(size_t size_bytes, const HostLocation& location);
  bool has_handle() const { return bool(object_); }
  CUmemGenericAllocationHandle handle() const { return object_.handle; }
  size_t size_bytes() const { return object_.size_bytes; }
  int device() const { return object_.device; }  // kOnHost: none
  bool is_on_host() const { return has_handle() && device() == kOnHost; }
  HandleKind kind() const { return {size_bytes(), is_exportable_}; }

  // Throws DriverError; StateError where the process may open no more files.
  Descriptor export_file() const;

  // Frees the memory now. Throws DriverError and keeps the handle if the driver refuses.
  void release();

 private:
  using Owner::Owner;
  static PhysicalMemory create(size_t size_bytes, const CUmemAllocationProp& properties, int device);

  bool is_exportable_ = false;
  Descriptor taken_over_;
};

// Of a handle at this location.
CUmemAllocationProp properties_at(const CUmemLocation& location);
// The unit of physical memory and addresses on a device, bytes. Asked once per device.
size_t granularity(int device);
// Whether handles on this device can be made usable by GPUDirect RDMA.
bool is_rdma_capable(int device);

}  // namespace ebbtide
