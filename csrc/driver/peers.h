#pragma once

#include <bitset>

#include "driver/context.h"

// The devices that may use each other's memory. A program enables peer access without telling ebbtide (torch does at
// its first copy between two devices), and then writes a peer's memory from kernels and copies of its own device. So
// every device counts that could have enabled it: its primary context is alive, and it can access the device.
namespace ebbtide {

using DeviceSet = std::bitset<kMaxDevices>;

inline DeviceSet only(int device) { return DeviceSet().set(static_cast<size_t>(device)); }

// The devices whose primary context is alive. Empty if the process sees only one device; the driver is not asked then.
// Devices whose state the driver does not report are left out.
DeviceSet live_devices() noexcept;

// The other devices among these that can access its memory, or for which the driver does not say. The driver is asked
// once for each pair.
DeviceSet peers_of(int device, const DeviceSet& devices) noexcept;

// For tests that reset the simulator.
void forget_peers() noexcept;

}  // namespace ebbtide
