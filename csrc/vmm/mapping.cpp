#include "vmm/mapping.h"

#include <array>
#include <cstdio>
#include <string>

#include "vmm/deferred_undos.h"

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
  check(driver().cuMemMap(address, size_bytes, 0, memory.handle(), 0), "cuMemMap", describe(address, size_bytes));
  Mapping mapping;  // from here on the destructor undoes it
  mapping.address_ = address;
  mapping.size_bytes_ = size_bytes;
  mapping.handle_ = memory.handle();
  mapping.device_ = memory.device();
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
  const CUresult result = driver_if_loaded()->cuMemSetAccess(address_, size_bytes_, accesses.data(), count);
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

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this == &other) return *this;
  Mapping old = std::move(*this);
  address_ = std::exchange(other.address_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  handle_ = other.handle_;
  device_ = other.device_;
  granted_ = other.granted_;
  return *this;
}

Mapping::~Mapping() {
  if (!is_mapped()) return;
  const CUresult result = driver_if_loaded()->cuMemUnmap(address_, size_bytes_);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
    deferred_undos::add_unmap(address_, size_bytes_, handle_, device_);
}

void Mapping::unmap() {
  if (!is_mapped()) return;
  check(driver().cuMemUnmap(address_, size_bytes_), "cuMemUnmap", describe(address_, size_bytes_));
  address_ = 0;
  size_bytes_ = 0;
  granted_.reset();
}

}  // namespace ebbtide
