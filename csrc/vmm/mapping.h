#pragma once

#include "driver/peers.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

// Owns the mapping of a handle into a part of a reservation, readable and writable by the device and its peers.
// Unmapping drops the access rights too.
//
// Relied on: cuMemMap takes offset 0 only, so a mapping covers its whole handle. cuMemUnmap does not wait for kernels,
// so the caller must have waited. cuMemSetAccess does not change the access of devices that it does not name, so a peer
// can be added while kernels use the memory (csrc/DESIGN.md, F2, F4, F6).
class Mapping : public Owner<Undo> {
 public:
  Mapping() = default;
  // device reads and writes it. The peers do too if the driver permits all of them, and otherwise none of them;
  // missing() lists those, and grant() can retry them.
  static Mapping map(CUdeviceptr address, const PhysicalMemory& memory, int device, const DeviceSet& peers = {});
  // Maps the device's own memory.
  static Mapping map(CUdeviceptr address, const PhysicalMemory& memory) {
    return map(address, memory, memory.device());
  }
  bool is_mapped() const { return bool(object_); }
  CUdeviceptr address() const { return object_.object; }  // 0: none
  // Throws DriverError and stays mapped if the driver refuses.
  void unmap();

  // Gives these devices read and write access; kernels may be using the memory. Devices that had access keep it,
  // whatever the driver answers. Returns the driver's first refusal; the devices that it did not refuse have access.
  CUresult grant(const DeviceSet& peers) noexcept;
  // Those of these devices that have no access.
  DeviceSet missing(const DeviceSet& peers) const { return is_mapped() ? peers & ~granted_ : DeviceSet{}; }

 private:
  using Owner::Owner;
  CUresult set_access(const DeviceSet& devices) noexcept;

  DeviceSet granted_;
};

}  // namespace ebbtide
