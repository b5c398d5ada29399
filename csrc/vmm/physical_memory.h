#pragma once

#include <cstddef>
#include <utility>

#include "driver/driver.h"
#include "vmm/host_location.h"

namespace ebbtide {

// Used in place of a device's ordinal for host memory.
inline constexpr int kOnHost = -1;

// Owns one driver handle: physical memory without an address. It may be released while it is mapped; the mapping then
// keeps the memory.
//
// Relied on: the memory of a new handle reads as zeros, on the device and on the host (csrc/DESIGN.md, F5).
class PhysicalMemory {
 public:
  PhysicalMemory() = default;
  // On the device. size_bytes is a multiple of granularity(device). Throws DriverError, with the code
  // CUDA_ERROR_OUT_OF_MEMORY if there is too little.
  static PhysicalMemory create_on_device(size_t size_bytes, int device);
  // On the host. size_bytes is a multiple of the location's granularity. The kernel charges this memory to no cgroup
  // (csrc/DESIGN.md, F15), so the caller has claimed it from the host budget.
  static PhysicalMemory create_on_host(size_t size_bytes, const HostLocation& location);
  PhysicalMemory(PhysicalMemory&& other) noexcept
      : handle_(std::exchange(other.handle_, 0)),
        size_bytes_(std::exchange(other.size_bytes_, 0)),
        device_(other.device_) {}
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept;
  ~PhysicalMemory();

  bool has_handle() const { return size_bytes_ != 0; }
  CUmemGenericAllocationHandle handle() const { return handle_; }
  size_t size_bytes() const { return size_bytes_; }
  int device() const { return device_; }  // kOnHost: none
  bool is_on_host() const { return has_handle() && device_ == kOnHost; }

  // Frees the memory now. Throws DriverError and keeps the handle if the driver refuses.
  void release();

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  size_t size_bytes_ = 0;
  int device_ = -1;
};

// The unit of physical memory and addresses on a device, bytes. Asked once per device.
size_t granularity(int device);
// Whether handles on this device can be made usable by GPUDirect RDMA.
bool is_rdma_capable(int device);

}  // namespace ebbtide
