#include "driver/bus.h"

#include <cstdio>
#include <fstream>
#include <locale>

#include "driver/driver.h"

namespace ebbtide {
namespace {

// Of the link's transfers, eight of which carry a byte for each lane. Measured: 51.3 GB/s of 64 (H200, PCIe 5 x16).
constexpr double kUsableShare = 0.8;

std::optional<double> read_number(const std::string& path) {
  std::ifstream file(path);
  file.imbue(std::locale::classic());  // not the program's, to which "32.0" may be no number
  double number = 0;
  if (!(file >> number) || number <= 0) return std::nullopt;
  return number;
}

}  // namespace

std::optional<uint64_t> expected_read_rate(int device, const std::string& pci_devices) {
  const auto domain = find_attribute(device, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
  const auto bus = find_attribute(device, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
  const auto slot = find_attribute(device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
  if (!domain || !bus || !slot) return std::nullopt;
  char name[32];
  std::snprintf(name, sizeof name, "/%04x:%02x:%02x.0/", static_cast<unsigned>(*domain), static_cast<unsigned>(*bus),
                static_cast<unsigned>(*slot));
  // "32.0 GT/s PCIe". An idle link goes slower for the time being; its width stays.
  const auto gigatransfers = read_number(pci_devices + name + "max_link_speed");
  const auto lanes = read_number(pci_devices + name + "current_link_width");
  if (!gigatransfers || !lanes) return std::nullopt;
  return static_cast<uint64_t>(*gigatransfers * 1e9 * *lanes / 8 * kUsableShare);
}

std::string describe_reads(int device) {
  const auto rate = expected_read_rate(device);
  if (!rate) return "reads over the bus";
  return "reads over the bus, at about " + std::to_string((*rate + 500'000'000) / 1'000'000'000) + " GB/s";
}

}  // namespace ebbtide
