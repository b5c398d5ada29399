#include "vmm/mapping.h"

#include <cstdio>
#include <string>
#include <vector>

#include "vmm/limbo.h"

namespace ebbtide {
namespace {

std::string describe(CUdeviceptr address, size_t size_bytes) {
  char text[80];
  std::snprintf(text, sizeof text, "ptr=0x%llx, size=%zu", static_cast<unsigned long long>(address), size_bytes);
  return text;
}

}  // namespace

Mapping Mapping::map(CUdeviceptr address, const PhysicalMemory& memory, std::span<const int> devices) {
  const size_t size_bytes = memory.size_bytes();
  check(driver().cuMemMap(address, size_bytes, 0, memory.handle(), 0), "cuMemMap", describe(address, size_bytes));
  Mapping mapping;  // from here on the destructor undoes it
  mapping.address_ = address;
  mapping.size_bytes_ = size_bytes;
  mapping.handle_ = memory.handle();
  mapping.device_ = memory.device();
  const int owner = memory.device();
  std::vector<CUmemAccessDesc> accesses;
  for (const int device : devices.empty() ? std::span(&owner, 1) : devices) {
    CUmemAccessDesc& access = accesses.emplace_back();
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  check(driver().cuMemSetAccess(address, size_bytes, accesses.data(), accesses.size()), "cuMemSetAccess",
        describe(address, size_bytes));
  return mapping;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this == &other) return *this;
  Mapping old = std::move(*this);
  address_ = std::exchange(other.address_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  handle_ = other.handle_;
  device_ = other.device_;
  return *this;
}

Mapping::~Mapping() {
  if (!is_mapped()) return;
  const CUresult result = driver_if_loaded()->cuMemUnmap(address_, size_bytes_);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
    limbo::add_unmap(address_, size_bytes_, handle_, device_);
}

void Mapping::unmap() {
  if (!is_mapped()) return;
  check(driver().cuMemUnmap(address_, size_bytes_), "cuMemUnmap", describe(address_, size_bytes_));
  address_ = 0;
  size_bytes_ = 0;
}

}  // namespace ebbtide
