#include "vmm/host_location.h"

#include <map>
#include <mutex>

#include "base/error.h"
#include "driver/context.h"
#include "vmm/physical_memory.h"

namespace ebbtide {
namespace {

struct Answers {
  std::mutex mutex;
  std::map<int, HostLocation> by_device;
};
Answers& answers() {
  static Answers* const instance = new Answers;
  return *instance;
}

// Empty if the location works for the device; the location then has its granularity.
std::string try_location(int device, HostLocation& location) {
  const CUmemAllocationProp properties = properties_at(location.where);
  try {
    check(driver().cuMemGetAllocationGranularity(&location.granularity_bytes, &properties,
                                                 CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    if (location.granularity_bytes == 0 || granularity(device) % location.granularity_bytes != 0)
      return "its granularity of " + std::to_string(location.granularity_bytes) + " bytes does not fit the device's";
    PhysicalMemory::create_on_host(granularity(device), location);
    return "";
  } catch (const DriverError& error) {
    // A place that is full now exists all the same.
    return error.code == CUDA_ERROR_OUT_OF_MEMORY ? "" : error.what();
  }
}

}  // namespace

std::string describe(const HostLocation& location) {
  return location.where.type == CU_MEM_LOCATION_TYPE_HOST
             ? "host memory of any node"
             : "host memory near the device, NUMA node " + std::to_string(location.where.id);
}

HostProbe probe_host_location(int device) {
  const ContextScope scope(device);
  const int node = find_attribute(device, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID).value_or(0);
  HostLocation near{.where = {}};
  near.where.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  near.where.id = node < 0 ? 0 : node;
  const std::string name = "NUMA node " + std::to_string(near.where.id);
  const std::string numa_problem = try_location(device, near);
  if (numa_problem.empty()) return {near, describe(near)};
  HostLocation anywhere{.where = {}};
  anywhere.where.type = CU_MEM_LOCATION_TYPE_HOST;
  const std::string host_problem =
      find_attribute(device, CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED).value_or(0) == 0
          ? "the device does not offer it"
          : try_location(device, anywhere);
  if (host_problem.empty()) return {anywhere, describe(anywhere) + " (on " + name + ": " + numa_problem + ")"};
  return {std::nullopt, "on " + name + ": " + numa_problem + "; on the host at large: " + host_problem};
}

std::optional<HostLocation> host_location(int device) {
  {
    const std::lock_guard lock(answers().mutex);
    const auto found = answers().by_device.find(device);
    if (found != answers().by_device.end()) return found->second;
  }
  const HostProbe probe = probe_host_location(device);
  if (!probe.location) return std::nullopt;
  const std::lock_guard lock(answers().mutex);
  return answers().by_device.emplace(device, *probe.location).first->second;
}

void forget_host_locations() noexcept {
  const std::lock_guard lock(answers().mutex);
  answers().by_device.clear();
}

}  // namespace ebbtide
