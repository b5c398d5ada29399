#pragma once

#include <bitset>

#include "driver/context.h"

// Which devices may be using each other's memory. A program enables peer access without a word to us (torch at its first copy between two devices), and then writes a peer's memory from kernels and copies of
// its own device. So whoever could have enabled it counts: those whose primary context is alive, and that reach the device.
namespace ebbtide {

using DeviceSet = std::bitset<kMaxDevices>;

inline DeviceSet only(int device) { return DeviceSet().set(static_cast<size_t>(device)); }

// The devices whose primary context is alive; none where the process sees one device, of which nothing is asked. Whom the driver says nothing of is not among them.
DeviceSet live_devices() noexcept;

// Of these, the ones other than device that reach its memory, or of which the driver does not say. It is asked once for each pair.
DeviceSet peers_of(int device, const DeviceSet& devices) noexcept;

// For tests that reset the simulator.
void forget_peers() noexcept;

}  // namespace ebbtide
