#include "vmm/physical_memory.h"

#include <atomic>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "driver/context.h"
#include "vmm/late_memory.h"

namespace ebbtide {
namespace {

// What others use for handles on AMD's devices.
constexpr uint64_t kMostBytesOnHip = 256 * kMiB;

CUmemAllocationProp device_properties(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  CUmemAllocationProp properties = properties_at(location);
  properties.allocFlags.gpuDirectRDMACapable = is_rdma_capable(device) ? 1 : 0;
  return properties;
}

}  // namespace

CUmemAllocationProp properties_at(const CUmemLocation& location) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location;
  return properties;
}

bool is_rdma_capable(int device) {
  static constinit std::atomic<signed char> answers[kMaxDevices]{};  // 0 not asked, 1 no, 2 yes
  std::atomic<signed char>& answer = answers[device_index(device)];
  if (answer == 0)
    answer = device_attribute(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0 ? 2 : 1;
  return answer == 2;
}

size_t granularity(int device) {
  static constinit std::atomic<size_t> answers[kMaxDevices]{};
  std::atomic<size_t>& answer = answers[device_index(device)];
  if (answer != 0) return answer;
  if (device_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    throw StateError("device " + std::to_string(device) +
                     " has no virtual memory management: ebbtide can't move its memory");
  }
  const CUmemAllocationProp properties = device_properties(device);
  size_t bytes = 0;
  check(driver().cuMemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity", "device=" + std::to_string(device));
  return answer = bytes;
}

PhysicalMemory PhysicalMemory::create(size_t size_bytes, const CUmemAllocationProp& properties, int device) {
  CUmemGenericAllocationHandle handle = 0;
  check(driver().cuMemCreate(&handle, size_bytes, &properties, 0), "cuMemCreate",
        "size=" + std::to_string(size_bytes) +
            (device == kOnHost ? ", on the host" : ", device=" + std::to_string(device)));
  return PhysicalMemory({Undo::Kind::kRelease, handle, size_bytes, device, handle});
}

uint64_t PhysicalMemory::most_bytes() noexcept { return speaks_hip() ? kMostBytesOnHip : UINT64_MAX; }
bool PhysicalMemory::is_made_clear() noexcept { return !speaks_hip(); }

PhysicalMemory PhysicalMemory::create_on_device(size_t size_bytes, int device, bool is_exportable) {
  CUmemAllocationProp properties = device_properties(device);
  if (is_exportable) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  PhysicalMemory memory = create(size_bytes, properties, device);
  late_memory::after_create(device, size_bytes);
  memory.is_exportable_ = is_exportable;
  return memory;
}

PhysicalMemory PhysicalMemory::import_file(int file, size_t size_bytes, int device) {
  CUmemGenericAllocationHandle handle = 0;
  void* const given = reinterpret_cast<void*>(static_cast<intptr_t>(file));  // the driver's way to pass a descriptor
  check(driver().cuMemImportFromShareableHandle(&handle, given, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle", "size=" + std::to_string(size_bytes));
  PhysicalMemory memory({Undo::Kind::kRelease, handle, size_bytes, device, handle});
  memory.object_.is_import = true;
  return memory;
}

PhysicalMemory PhysicalMemory::take_over(Descriptor file, size_t size_bytes, int device) {
  PhysicalMemory memory = import_file(file.file(), size_bytes, device);
  memory.is_exportable_ = true;
  memory.taken_over_ = std::move(file);
  return memory;
}

Descriptor PhysicalMemory::export_file() const {
  if (taken_over_) {
    Descriptor copy = Descriptor::copy_of(taken_over_.file());
    if (!copy) throw StateError("this process may open no more files, which memory for others needs: raise its limit");
    return copy;
  }
  int file = -1;
  check(driver().cuMemExportToShareableHandle(&file, handle(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle", "size=" + std::to_string(size_bytes()));
  return Descriptor(file);
}

PhysicalMemory PhysicalMemory::create_on_host(size_t size_bytes, const HostLocation& location) {
  return create(size_bytes, properties_at(location.where), kOnHost);
}

void PhysicalMemory::release() {
  if (!has_handle()) return;
  const int own_device = object_.is_import ? kOnHost : device();
  late_memory::before_release(own_device, size_bytes());
  const CUresult result = driver().cuMemRelease(handle());
  if (result != CUDA_SUCCESS) late_memory::after_refusal(own_device, size_bytes());
  check(result, "cuMemRelease", "size=" + std::to_string(size_bytes()));
  object_ = {};
  taken_over_ = {};
}

}  // namespace ebbtide
