#include "vmm/physical_memory.h"

#include <atomic>
#include <string>

#include "base/error.h"
#include "driver/context.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {
namespace {

CUmemAllocationProp device_properties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.allocFlags.gpuDirectRDMACapable = is_rdma_capable(device) ? 1 : 0;
  return properties;
}

void check_ordinal(int device) {
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("there is no device " + std::to_string(device));
}

}  // namespace

bool is_rdma_capable(int device) {
  check_ordinal(device);
  static std::atomic<signed char> answers[kMaxDevices]{};  // 0 not asked, 1 no, 2 yes
  if (const signed char answer = answers[device].load()) return answer == 2;
  const bool is_capable = device_attribute(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  answers[device].store(is_capable ? 2 : 1);
  return is_capable;
}

size_t granularity(int device) {
  check_ordinal(device);
  static std::atomic<size_t> answers[kMaxDevices]{};
  if (const size_t answer = answers[device].load()) return answer;
  if (device_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    throw StateError("device " + std::to_string(device) +
                     " has no virtual memory management: ebbtide can't move its memory");
  }
  const CUmemAllocationProp properties = device_properties(device);
  size_t bytes = 0;
  check(driver().cuMemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity", "device=" + std::to_string(device));
  answers[device].store(bytes);
  return bytes;
}

PhysicalMemory PhysicalMemory::create_on_device(size_t size_bytes, int device) {
  const CUmemAllocationProp properties = device_properties(device);
  PhysicalMemory memory;
  check(driver().cuMemCreate(&memory.handle_, size_bytes, &properties, 0), "cuMemCreate",
        "size=" + std::to_string(size_bytes) + ", device=" + std::to_string(device));
  memory.size_bytes_ = size_bytes;
  memory.device_ = device;
  return memory;
}

PhysicalMemory PhysicalMemory::create_on_host(size_t size_bytes, const HostLocation& location) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location.where;
  PhysicalMemory memory;
  check(driver().cuMemCreate(&memory.handle_, size_bytes, &properties, 0), "cuMemCreate",
        "size=" + std::to_string(size_bytes) + ", on the host");
  memory.size_bytes_ = size_bytes;
  memory.device_ = kOnHost;
  return memory;
}

PhysicalMemory& PhysicalMemory::operator=(PhysicalMemory&& other) noexcept {
  if (this == &other) return *this;
  PhysicalMemory old = std::move(*this);
  handle_ = std::exchange(other.handle_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  device_ = other.device_;
  return *this;
}

PhysicalMemory::~PhysicalMemory() {
  if (!has_handle()) return;
  const CUresult result = driver_if_loaded()->cuMemRelease(handle_);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
    deferred_undos::add_release(handle_, size_bytes_, device_);
}

void PhysicalMemory::release() {
  if (!has_handle()) return;
  check(driver().cuMemRelease(handle_), "cuMemRelease", "size=" + std::to_string(size_bytes_));
  handle_ = 0;
  size_bytes_ = 0;
}

}  // namespace ebbtide
