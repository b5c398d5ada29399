#include "preload/allocate.h"
#include "preload/hook_call.h"
#include "preload/reported.h"

// How much memory a device has, and how much of it is free: what EBBTIDE_REPORT says, within EBBTIDE_DEVICE_LIMIT.
using namespace ebbtide::preload;
using ebbtide::policy::MemoryNumbers;

namespace {

// Where we can't answer, what the driver said stands.
MemoryNumbers reported_or(MemoryNumbers driver_says, int device) noexcept {
  try {
    return reported(driver_says, device);
  } catch (...) {
    code_of_exception("cuMemGetInfo");
    return driver_says;
  }
}

// The device whose CUDA number the program knows it by; -1 where it is not told, or the driver has not started.
int device_of_nvml(NvmlDevice device) {
  const auto get_pci = real_nvml<&nvmlDeviceGetPciInfo_v3>();
  NvmlPciInfo pci{};
  if (get_pci == nullptr || get_pci(device, &pci) != kNvmlSuccess) return -1;
  return device_at({pci.domain, pci.bus, pci.device});
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return call_hook<&cuMemGetInfo_v2>(
      "cuMemGetInfo",
      [&](auto real_function) {
        // Each output is optional, and each number that is told depends on both of the driver's.
        if (free_bytes == nullptr && total_bytes == nullptr) return real_function(nullptr, nullptr);
        size_t free = 0, total = 0;
        const CUresult result = real_function(&free, &total);
        if (result != CUDA_SUCCESS) return result;
        const MemoryNumbers told = reported_or({free, total}, current_device());
        if (free_bytes != nullptr) *free_bytes = told.free_bytes;
        if (total_bytes != nullptr) *total_bytes = told.total_bytes;
        return result;
      },
      free_bytes, total_bytes);
}

EBBTIDE_HOOK_EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return call_hook<&cuDeviceTotalMem_v2>(
      "cuDeviceTotalMem",
      [&](auto real_function) {
        const CUresult result = real_function(bytes, device);
        if (result == CUDA_SUCCESS && bytes != nullptr) *bytes = reported_or({0, *bytes}, device).total_bytes;
        return result;
      },
      bytes, device);
}

EBBTIDE_HOOK_EXPORT NvmlResult nvmlDeviceGetMemoryInfo(NvmlDevice device, NvmlMemory* memory) {
  const auto real_function = real_nvml<&nvmlDeviceGetMemoryInfo>();
  return call_nvml(real_function, device, memory, [&] {
    const MemoryNumbers told = reported({memory->free, memory->total}, device_of_nvml(device));
    *memory = {told.total_bytes, told.free_bytes, told.total_bytes - told.free_bytes};
  });
}

EBBTIDE_HOOK_EXPORT NvmlResult nvmlDeviceGetMemoryInfo_v2(NvmlDevice device, NvmlMemoryV2* memory) {
  const auto real_function = real_nvml<&nvmlDeviceGetMemoryInfo_v2>();
  return call_nvml(real_function, device, memory, [&] {
    const MemoryNumbers told = reported({memory->free, memory->total}, device_of_nvml(device));
    const auto not_free = told.total_bytes - told.free_bytes;
    memory->total = told.total_bytes;
    memory->free = told.free_bytes;
    // Memory that the driver keeps for itself is not used by programs.
    memory->used = not_free > memory->reserved ? not_free - memory->reserved : 0;
  });
}
