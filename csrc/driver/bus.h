#pragma once

#include <cstdint>
#include <optional>
#include <string>

// What lies between a device and the host.
namespace ebbtide {

inline constexpr const char* kPciDevices = "/sys/bus/pci/devices";

// Bytes a second that kernels can be expected to read of host memory, by what the system says of the device's PCI Express link; none where it says nothing.
std::optional<uint64_t> expected_read_rate(int device, const std::string& pci_devices = kPciDevices);

// "reads over the bus, at about 51 GB/s", for people; without the rate where it is not known.
std::string describe_reads(int device);

}  // namespace ebbtide
