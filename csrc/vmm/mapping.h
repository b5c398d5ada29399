#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "vmm/physical_memory.h"

namespace ebbtide {

// Owns the fact that a handle stands behind a part of a reservation, readable and writable by the device. Unmapping drops the access rights as well.
//
// Relied on: cuMemMap takes offset 0 only, so a mapping covers its whole handle; cuMemUnmap does not wait for kernels, so the caller must have.
class Mapping {
 public:
  Mapping() = default;
  // devices: who may read and write it; none given: the device whose memory it is. Host memory names them.
  static Mapping map(CUdeviceptr address, const PhysicalMemory& memory, std::span<const int> devices = {});
  Mapping(Mapping&& other) noexcept
      : address_(std::exchange(other.address_, 0)),
        size_bytes_(std::exchange(other.size_bytes_, 0)),
        handle_(other.handle_),
        device_(other.device_) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  bool is_mapped() const { return address_ != 0; }
  // Throws DriverError and stays mapped when the driver refuses.
  void unmap();

 private:
  CUdeviceptr address_ = 0;
  size_t size_bytes_ = 0;
  // What is mapped, for the books of limbo.
  CUmemGenericAllocationHandle handle_ = 0;
  int device_ = -1;
};

}  // namespace ebbtide
