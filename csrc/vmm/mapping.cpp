#include "vmm/mapping.h"

#include <array>
#include <cstdio>
#include <string>
#include <utility>

#include "vmm/held_addresses.h"

namespace ebbtide {
namespace {

std::string describe(CUdeviceptr address, size_t size_bytes) {
  char text[80];
  std::snprintf(text, sizeof text, "ptr=0x%llx, size=%zu", static_cast<unsigned long long>(address), size_bytes);
  return text;
}

}  // namespace

Mapping Mapping::map(CUdeviceptr address, const PhysicalMemory& memory, int device, const DeviceSet& peers) {
  const size_t size_bytes = memory.size_bytes();
  Undo undo{Undo::Kind::kUnmap, address, size_bytes, memory.device(), memory.handle()};
  undo.is_lent = held_addresses::are_used();
  if (undo.is_lent) {
    deferred_undos::retry(false);  // a range that the driver has still
    held_addresses::lend(address, size_bytes);
  }
  if (const CUresult result = driver().cuMemMap(address, size_bytes, 0, memory.handle(), 0); result != CUDA_SUCCESS) {
    undo.kind = Undo::Kind::kTakeBack;
    undo.handle = 0;
    if (undo.is_lent) undo.undo();
    check(result, "cuMemMap", describe(address, size_bytes));
  }
  Mapping mapping(undo);
  const DeviceSet own = only(device);
  if (peers.any() && mapping.set_access(own | peers) == CUDA_SUCCESS) return mapping;
  check(mapping.set_access(own), "cuMemSetAccess", describe(address, size_bytes));
  return mapping;
}

CUresult Mapping::set_access(const DeviceSet& devices) noexcept {
  std::array<CUmemAccessDesc, kMaxDevices> accesses{};
  size_t count = 0;
  for (int device = 0; device < kMaxDevices; ++device) {
    if (!devices.test(static_cast<size_t>(device))) continue;
    CUmemAccessDesc& access = accesses[count++];
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  const CUresult result = driver_if_loaded()->cuMemSetAccess(address(), object_.size_bytes, accesses.data(), count);
  if (result == CUDA_SUCCESS) granted_ |= devices;
  return result;
}

CUresult Mapping::grant(const DeviceSet& peers) noexcept {
  const DeviceSet wanted = missing(peers);
  if (wanted.none()) return CUDA_SUCCESS;
  CUresult first = set_access(wanted);
  if (first == CUDA_SUCCESS || wanted.count() == 1) return first;
  first = CUDA_SUCCESS;
  // A device that is refused does not affect the others.
  for (int device = 0; device < kMaxDevices; ++device) {
    if (!wanted.test(static_cast<size_t>(device))) continue;
    const CUresult result = set_access(only(device));
    if (first == CUDA_SUCCESS) first = result;
  }
  return first;
}

void Mapping::unmap() {
  if (!is_mapped()) return;
  const size_t size_bytes = object_.size_bytes;
  check(driver().cuMemUnmap(address(), size_bytes), "cuMemUnmap", describe(address(), size_bytes));
  Undo rest = std::exchange(object_, {});
  rest.kind = Undo::Kind::kTakeBack;
  if (rest.is_lent) rest.undo();
  granted_.reset();
}

}  // namespace ebbtide
