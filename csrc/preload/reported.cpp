#include "preload/reported.h"

#include "core/saver.h"
#include "preload/resolver.h"
#include "preload/settings.h"

namespace ebbtide::preload {
namespace {

bool has_attribute(CUdevice device, CUdevice_attribute attribute, unsigned int wanted) {
  int value = 0;
  return real_if_loaded<&cuDeviceGetAttribute>()(&value, attribute, device) == CUDA_SUCCESS &&
         static_cast<unsigned int>(value) == wanted;
}

}  // namespace

policy::MemoryNumbers reported(policy::MemoryNumbers driver_says, int device) {
  const Saver& saver = Saver::instance();
  policy::ReportFacts facts;
  facts.driver = driver_says;
  facts.limit_bytes = saver.device_budget.limit_bytes();
  facts.held_bytes = saver.device_budget.held_bytes(device);
  // Reading the container's limits takes a while; the truth does not need them.
  if (settings().report != policy::Report::kDevice) {
    facts.host_available_bytes = saver.host_budget.available_bytes();
    static const uint64_t share = saturating_add(facts.host_available_bytes, saver.host_budget.held_bytes());
    facts.host_share_bytes = share;
  }
  return policy::report_memory(facts, settings().report);
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
