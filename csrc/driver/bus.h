#pragma once

#include <cstdint>
#include <optional>
#include <string>

// The link between a device and the host.
namespace ebbtide {

inline constexpr const char* kPciDevices = "/sys/bus/pci/devices";

// The rate, in bytes a second, at which kernels can be expected to read host memory, computed from what the system
// reports of the device's PCI Express link. Empty if it reports nothing.
std::optional<uint64_t> expected_read_rate(int device, const std::string& pci_devices = kPciDevices);

// "reads over the bus, at about 51 GB/s", for users; without the rate if it is unknown.
std::string describe_reads(int device);

}  // namespace ebbtide
