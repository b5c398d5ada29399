#pragma once

// The hooked part of NVML, by its ABI, so that the build needs no header of NVML.
extern "C" {

using NvmlDevice = struct NvmlDeviceState*;
using NvmlResult = int;
inline constexpr NvmlResult kNvmlSuccess = 0;
inline constexpr NvmlResult kNvmlUninitialized = 1;

struct NvmlMemory {
  unsigned long long total, free, used;  // bytes
};
struct NvmlMemoryV2 {
  unsigned int version;
  unsigned long long total, reserved, free, used;  // bytes
};
struct NvmlPciInfo {
  char legacy_bus_id[16];
  unsigned int domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

NvmlResult nvmlDeviceGetMemoryInfo(NvmlDevice device, NvmlMemory* memory);
NvmlResult nvmlDeviceGetMemoryInfo_v2(NvmlDevice device, NvmlMemoryV2* memory);
NvmlResult nvmlDeviceGetPciInfo_v3(NvmlDevice device, NvmlPciInfo* pci);
}
