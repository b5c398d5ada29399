#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ebbtide {

struct DeviceFacts {
  std::string name;
  std::array<uint8_t, 16> uuid{};
  int compute_capability = 0;  // 90 for 9.0
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;
  uint64_t granularity_bytes = 0;
};
DeviceFacts describe_device(int device);

// One thing that a driver and device can or can't do.
struct Capability {
  std::string name;
  bool is_available = false;
  std::string found;   // the probe's finding
  std::string advice;  // "" if there is nothing to do
};
// Asks the driver for each, by a real call where an attribute is known to lie.
std::vector<Capability> probe_capabilities(int device);

}  // namespace ebbtide
