// Initialisation of the driver, and queries about the driver and its devices.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

// Attributes that a client may query before it decides what to use. All others are 0.
const std::map<int, int>& attributes() {
  static const auto* const values = new std::map<int, int>{
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
      // Only kernels that the simulator knows by name run here, so no architecture is claimed.
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0},
      {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0},
      {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
      {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0xffff},  // a domain in which the machine itself has no devices
      {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0},
  };
  return *values;
}

CUresult init(unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (simulator().physical.device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  if (const CUresult failed = simulator().physical.open(); failed != CUDA_SUCCESS) return failed;
  simulator().is_initialised = true;
  simulator().owner = getpid();
  return CUDA_SUCCESS;
}

CUresult driver_version(int* driverVersion) {
  if (driverVersion == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  *driverVersion = simulator().driver_version;
  return CUDA_SUCCESS;
}

CUresult device_count(int* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  *count = simulator().physical.device_count();
  return CUDA_SUCCESS;
}

CUresult get_device(CUdevice* device, int ordinal) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult device_name(char* name, int len, CUdevice dev) {
  if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(len), "ebbtide simulated device");
  return CUDA_SUCCESS;
}

CUresult device_uuid(CUuuid* uuid, CUdevice dev) {
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  const DeviceUse::Owner owner = simulator().physical.owner();
  uuid->bytes[0] = static_cast<char>(dev);
  std::memcpy(uuid->bytes + 1, &owner.number, 7);
  std::memcpy(uuid->bytes + 8, owner.is_shared ? "sharing" : "process", 8);
  return CUDA_SUCCESS;
}

CUresult device_attribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  if (pi == nullptr || attrib <= 0 || attrib >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  if (attrib == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
    *pi = dev + 1;
    return CUDA_SUCCESS;
  }
  const auto found = attributes().find(attrib);
  *pi = found == attributes().end() ? 0 : found->second;
  return CUDA_SUCCESS;
}

CUresult total_memory(size_t* bytes, CUdevice dev) {
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = simulator().physical.capacity(dev);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuInit(unsigned int Flags) { EBBTIDE_SIM_FORWARD(cuInit, kAnytime, init, Flags); }

EBBTIDE_SIM_EXPORT CUresult cuDriverGetVersion(int* driverVersion) {
  EBBTIDE_SIM_FORWARD(cuDriverGetVersion, kAnytime, driver_version, driverVersion);
}

EBBTIDE_SIM_EXPORT CUresult cuDeviceGetCount(int* count) {
  EBBTIDE_SIM_FORWARD(cuDeviceGetCount, kDriver, device_count, count);
}

EBBTIDE_SIM_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  EBBTIDE_SIM_FORWARD(cuDeviceGet, kDriver, get_device, device, ordinal);
}

EBBTIDE_SIM_EXPORT CUresult cuDeviceGetName(char* name, int len, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuDeviceGetName, kDriver, device_name, name, len, dev);
}

EBBTIDE_SIM_EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuDeviceGetUuid, kDriver, device_uuid, uuid, dev);
}
EBBTIDE_SIM_PLAIN_NAME(cuDeviceGetUuid);

EBBTIDE_SIM_EXPORT CUresult cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuDeviceGetAttribute, kDriver, device_attribute, pi, attrib, dev);
}

EBBTIDE_SIM_EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuDeviceTotalMem, kDriver, total_memory, bytes, dev);
}

EBBTIDE_SIM_PLAIN_NAME(cuDeviceTotalMem);
