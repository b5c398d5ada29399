#pragma once

#include <cstddef>
#include <utility>

#include "driver/peers.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

// Owns the fact that a handle stands behind a part of a reservation, readable and writable by the device and its peers. Unmapping drops the access rights as well.
//
// Relied on: cuMemMap takes offset 0 only, so a mapping covers its whole handle; cuMemUnmap does not wait for kernels, so the caller must have. cuMemSetAccess changes nothing for devices that it does not
// name, so that a peer is added while kernels use the memory.
class Mapping {
 public:
  Mapping() = default;
  // device: who reads and writes it. peers: who does so as well, if the driver lets all of them: else none of them, which missing() says and grant() may make good.
  static Mapping map(CUdeviceptr address, const PhysicalMemory& memory, int device, const DeviceSet& peers = {});
  // Of the device's own memory.
  static Mapping map(CUdeviceptr address, const PhysicalMemory& memory) {
    return map(address, memory, memory.device());
  }
  Mapping(Mapping&& other) noexcept
      : address_(std::exchange(other.address_, 0)),
        size_bytes_(std::exchange(other.size_bytes_, 0)),
        handle_(other.handle_),
        device_(other.device_),
        granted_(other.granted_) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  bool is_mapped() const { return address_ != 0; }
  // Throws DriverError and stays mapped when the driver refuses.
  void unmap();

  // Lets these read and write it as well; kernels may be using it. Who had access keeps it, whatever the driver says: its first refusal is the answer, the others have got it.
  CUresult grant(const DeviceSet& peers) noexcept;
  // Those of them that have no access.
  DeviceSet missing(const DeviceSet& peers) const { return is_mapped() ? peers & ~granted_ : DeviceSet{}; }

 private:
  CUresult set_access(const DeviceSet& devices) noexcept;

  CUdeviceptr address_ = 0;
  size_t size_bytes_ = 0;
  // What is mapped, for the books of deferred undos.
  CUmemGenericAllocationHandle handle_ = 0;
  int device_ = -1;
  DeviceSet granted_;
};

}  // namespace ebbtide
