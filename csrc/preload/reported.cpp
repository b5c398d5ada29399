#include "preload/reported.h"

#include "base/settings.h"
#include "core/state/core.h"
#include "preload/resolver.h"
#include "preload/settings.h"

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

}  // namespace

policy::MemoryNumbers reported(policy::MemoryNumbers driver_says, int device) {
  if (const Core* core = Core::instance_if_made())
    return report(driver_says, device, core->budgets.device, core->budgets.host);
  DeviceBudget device_budget;
  HostBudget host_budget;
  set_limits(device_budget, host_budget);
  return report(driver_says, device, device_budget, host_budget);
}

int device_at(PciAddress place) {
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

}  // namespace ebbtide::preload
