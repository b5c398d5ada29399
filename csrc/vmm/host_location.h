#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "driver/driver.h"

namespace ebbtide {

// The location of host memory that a device accesses through mappings like those of its own memory.
struct HostLocation {
  CUmemLocation where{};
  size_t granularity_bytes = 0;
  friend bool operator<(const HostLocation& a, const HostLocation& b) {
    return a.where.type != b.where.type ? a.where.type < b.where.type : a.where.id < b.where.id;
  }
};

// "host memory near the device, NUMA node 0".
std::string describe(const HostLocation& location);

// The result of creating memory at each place: on the NUMA node near the device, else on the host at large.
struct HostProbe {
  std::optional<HostLocation> location;  // none: the driver can't make such memory
  std::string found;                     // a sentence for users
};
HostProbe probe_host_location(int device);

// The answer of the first probe that found a place, once per device.
std::optional<HostLocation> host_location(int device);
// For tests that reset the simulator.
void forget_host_locations() noexcept;

}  // namespace ebbtide
