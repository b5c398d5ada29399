#include "core/capabilities.h"

#include <cstdint>

#include "base/bytes.h"
#include "base/error.h"
#include "driver/context.h"
#include "vmm/mapping.h"
#include "vmm/reservation.h"

namespace ebbtide {
namespace {

int attribute(int device, CUdevice_attribute which) {
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet", "ordinal=" + std::to_string(device));
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute");
  return value;
}

Capability probe_vmm(int device) {
  Capability capability{"vmm", false, "", ""};
  try {
    const size_t bytes = granularity(device);
    const Reservation range = Reservation::reserve(bytes);
    const PhysicalMemory memory = PhysicalMemory::create_on_device(bytes, device);
    const Mapping mapping = Mapping::map(range.address(), memory);
    capability.is_available = true;
    capability.found = "reserved, created, mapped and released " + format_bytes(bytes) + ", the granularity";
  } catch (const std::exception& error) {
    capability.found = error.what();
    capability.advice =
        "pause and resume need it: free some device memory, update the driver, or check that the device supports "
        "virtual memory management";
  }
  return capability;
}

Capability probe_rdma(int device) {
  const bool is_available = is_rdma_capable(device);
  return {"rdma", is_available,
          is_available ? "handles are made usable by GPUDirect RDMA"
                       : "the device does not offer GPUDirect RDMA on this memory",
          is_available ? "" : "nothing to do unless network cards read this memory directly"};
}

Capability probe_host_numa(int device) {
  Capability capability{
      "host_numa", false, "",
      "overflow will fall back to other host memory; containers: allow the NUMA calls in the seccomp profile"};
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  properties.location.id = attribute(device, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
  if (properties.location.id < 0) properties.location.id = 0;
  const ContextScope scope(device);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver().cuMemCreate(&handle, granularity(device), &properties, 0);
  if (result != CUDA_SUCCESS) {
    capability.found =
        "cuMemCreate on NUMA node " + std::to_string(properties.location.id) + " gives " + result_name(result);
    return capability;
  }
  driver().cuMemRelease(handle);
  return {"host_numa", true, "host memory near the device, NUMA node " + std::to_string(properties.location.id), ""};
}

Capability probe_version() {
  int version = 0;
  check(driver().cuDriverGetVersion(&version), "cuDriverGetVersion");
  return {"driver", true, "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10), ""};
}

Capability probe_optional_functions() {
  const Driver& table = driver();
  std::string missing;
  const auto look = [&](const char* name, bool is_there) {
    if (!is_there) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
#define EBBTIDE_FUNCTION(name, version, need) look(#name, table.name != nullptr);
#include "driver/functions.def"
#undef EBBTIDE_FUNCTION
  return {"driver functions", missing.empty(), missing.empty() ? "all there" : "missing: " + missing,
          missing.empty() ? "" : "what needs them is off; a newer driver has them"};
}

}  // namespace

DeviceFacts describe_device(int device) {
  const ContextScope scope(device);
  DeviceFacts facts;
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet", "ordinal=" + std::to_string(device));
  char name[128] = {};
  check(driver().cuDeviceGetName(name, sizeof name, handle), "cuDeviceGetName");
  facts.name = name;
  facts.compute_capability = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) * 10 +
                             attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check(driver().cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo");
  facts.free_bytes = free_bytes;
  facts.total_bytes = total_bytes;
  facts.granularity_bytes = granularity(device);
  return facts;
}

std::vector<Capability> probe_capabilities(int device) {
  const ContextScope scope(device);
  return {probe_version(), probe_optional_functions(), probe_vmm(device), probe_rdma(device), probe_host_numa(device)};
}

}  // namespace ebbtide
