#include "base/settings.h"
#include "core/state/core.h"
#include "policy/reported_memory.h"
#include "preload/allocate.h"
#include "preload/hook_call.h"
#include "preload/settings.h"

// How much memory a device has, and how much of it is free: what EBBTIDE_REPORT says, within EBBTIDE_DEVICE_LIMIT.
namespace ebbtide::preload {
namespace {

bool has_attribute(CUdevice device, CUdevice_attribute attribute, unsigned int wanted) {
  int value = 0;
  return real_if_loaded<&cuDeviceGetAttribute>()(&value, attribute, device) == CUDA_SUCCESS &&
         static_cast<unsigned int>(value) == wanted;
}

// Sets the limits as the core would, without a core. A core made in a parent does not work in a forked child, and a
// parent that leaves CUDA to its children may use NVML.
void set_limits(DeviceBudget& device_budget, HostBudget& host_budget) {
  device_budget.set_limit(read_number(Setting::kDeviceLimit).value_or(kUnlimited));
  host_budget.set_limit(read_number(Setting::kHostLimit).value_or(kUnlimited));
  if (const auto bytes = read_number(Setting::kHostMargin)) host_budget.set_margin(*bytes);
}

// The host is of no use to a program that never spills.
policy::Report report_in_force() {
  return settings().on_shortage == OnShortage::kFail ? policy::Report::kDevice : settings().report;
}

uint64_t reserve_bytes(uint64_t total_bytes) {
  if (const Core* core = Core::instance_if_made()) return core->rules.overflow.reserve_of(total_bytes);
  return read_number(Setting::kReserve).value_or(policy::default_reserve(total_bytes));
}

policy::MemoryNumbers report(policy::MemoryNumbers driver_says, int device, const DeviceBudget& device_budget,
                             const HostBudget& host_budget) {
  policy::ReportFacts facts;
  facts.driver = driver_says;
  facts.limit_bytes = device_budget.own_limit_bytes();
  facts.held_bytes = device_budget.held_bytes(device);
  // Reading the container's limits takes a while; the truth does not need them.
  if (report_in_force() != policy::Report::kDevice) {
    facts.reserve_bytes = reserve_bytes(driver_says.total_bytes);
    facts.host_available_bytes = host_budget.available_bytes();
    static const uint64_t share = saturating_add(facts.host_available_bytes, host_budget.held_bytes());
    facts.host_share_bytes = share;
  }
  return policy::report_memory(facts, report_in_force());
}

// The numbers that the program sees, computed from the driver's. device is CUDA's number, or -1 if unknown; nothing of
// the limit then counts as taken.
policy::MemoryNumbers reported(policy::MemoryNumbers driver_says, int device) {
  if (const Core* core = Core::instance_if_made())
    return report(driver_says, device, core->budgets.device, core->budgets.host);
  DeviceBudget device_budget;
  HostBudget host_budget;
  set_limits(device_budget, host_budget);
  return report(driver_says, device, device_budget, host_budget);
}

// CUDA's number of the device at this place. -1 if there is none, or if the program has not started the driver, which
// this call does not start.
int device_at(const NvmlPciInfo& place) {
  const auto get_count = real_if_loaded<&cuDeviceGetCount>();
  const auto get_device = real_if_loaded<&cuDeviceGet>();
  int count = 0;
  if (get_count == nullptr || get_device == nullptr || get_count(&count) != CUDA_SUCCESS) return -1;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    if (get_device(&device, ordinal) == CUDA_SUCCESS &&
        has_attribute(device, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, place.domain) &&
        has_attribute(device, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, place.bus) &&
        has_attribute(device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, place.device))
      return ordinal;
  }
  return -1;
}

// Where there is no answer, what the driver said stands.
policy::MemoryNumbers reported_or(policy::MemoryNumbers driver_says, int device) noexcept {
  try {
    return reported(driver_says, device);
  } catch (...) {
    code_of_exception("cuMemGetInfo");
    return driver_says;
  }
}

// The same for the device whose CUDA number the program knows it by.
template <typename Memory>
policy::MemoryNumbers reported_of(NvmlDevice device, const Memory& memory) {
  const auto get_pci = real_nvml<&nvmlDeviceGetPciInfo_v3>();
  NvmlPciInfo pci{};
  const bool is_placed = get_pci != nullptr && get_pci(device, &pci) == kNvmlSuccess;
  return reported({memory.free, memory.total}, is_placed ? device_at(pci) : -1);
}

}  // namespace
}  // namespace ebbtide::preload

using namespace ebbtide::preload;

EBBTIDE_HOOK_EXPORT CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return call_hook<&cuMemGetInfo_v2>(
      [&](auto native) {
        // Each output is optional, and each number that is told depends on both of the driver's.
        if (free_bytes == nullptr && total_bytes == nullptr) return native();
        size_t free = 0, total = 0;
        const CUresult result = real<&cuMemGetInfo_v2>()(&free, &total);
        if (result != CUDA_SUCCESS) return result;
        const auto told = reported_or({free, total}, current_device());
        if (free_bytes != nullptr) *free_bytes = told.free_bytes;
        if (total_bytes != nullptr) *total_bytes = told.total_bytes;
        return result;
      },
      free_bytes, total_bytes);
}

EBBTIDE_HOOK_EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  return call_hook<&cuDeviceTotalMem_v2>(
      [&](auto native) {
        const CUresult result = native();
        if (result == CUDA_SUCCESS && bytes != nullptr) *bytes = reported_or({0, *bytes}, device).total_bytes;
        return result;
      },
      bytes, device);
}

EBBTIDE_HOOK_EXPORT NvmlResult nvmlDeviceGetMemoryInfo(NvmlDevice device, NvmlMemory* memory) {
  return call_nvml<&nvmlDeviceGetMemoryInfo>(device, memory, [&] {
    const auto told = reported_of(device, *memory);
    *memory = {told.total_bytes, told.free_bytes, told.total_bytes - told.free_bytes};
  });
}

EBBTIDE_HOOK_EXPORT NvmlResult nvmlDeviceGetMemoryInfo_v2(NvmlDevice device, NvmlMemoryV2* memory) {
  return call_nvml<&nvmlDeviceGetMemoryInfo_v2>(device, memory, [&] {
    const auto told = reported_of(device, *memory);
    const auto not_free = told.total_bytes - told.free_bytes;
    memory->total = told.total_bytes;
    memory->free = told.free_bytes;
    // Memory that the driver keeps for itself is not used by programs.
    memory->used = not_free > memory->reserved ? not_free - memory->reserved : 0;
  });
}
