#include "driver/peers.h"

#include <atomic>
#include <cstdint>
#include <optional>

namespace ebbtide {
namespace {

// Indexed by the accessing device and the accessed one: 0 not asked, 1 no, 2 yes.
constinit std::atomic<signed char> answers[kMaxDevices][kMaxDevices]{};

// The driver's handles, and 1: 0 is not asked. Each allocation asks on several GPUs.
constinit std::atomic<int64_t> handles[kMaxDevices]{};

std::optional<CUdevice> handle_of(const Driver& table, int device) noexcept {
  std::atomic<int64_t>& slot = handles[device];
  if (const int64_t known = slot.load(std::memory_order_relaxed)) return static_cast<CUdevice>(known - 1);
  CUdevice handle = 0;
  if (table.cuDeviceGet(&handle, device) != CUDA_SUCCESS) return std::nullopt;
  slot.store(int64_t{handle} + 1, std::memory_order_relaxed);
  return handle;
}

int peer_count(const Driver* table) noexcept {
  if (table == nullptr) return 0;
  try {
    const int count = known_device_count();
    return count < 2 ? 0 : count < kMaxDevices ? count : kMaxDevices;
  } catch (...) {
    return 0;  // a driver that does not say how many there are says so again where it matters
  }
}

bool is_live(const Driver& table, int device) noexcept {
  const auto handle = handle_of(table, device);
  unsigned int flags = 0;
  int is_active = 0;
  return handle && table.cuDevicePrimaryCtxGetState(*handle, &flags, &is_active) == CUDA_SUCCESS && is_active != 0;
}

bool reaches(const Driver& table, int device, int peer) noexcept {
  std::atomic<signed char>& answer = answers[device][peer];
  if (const signed char known = answer.load(std::memory_order_relaxed)) return known == 2;
  const auto from = handle_of(table, device);
  const auto to = handle_of(table, peer);
  int can = 0;
  // Without an answer cuMemSetAccess has the last word.
  if (!from || !to || table.cuDeviceCanAccessPeer(&can, *from, *to) != CUDA_SUCCESS) return true;
  answer.store(can != 0 ? 2 : 1, std::memory_order_relaxed);
  return can != 0;
}

}  // namespace

DeviceSet live_devices() noexcept {
  DeviceSet live;
  const Driver* const table = driver_if_loaded();
  const int count = peer_count(table);
  for (int device = 0; device < count; ++device) live[static_cast<size_t>(device)] = is_live(*table, device);
  return live;
}

DeviceSet peers_of(int device, const DeviceSet& devices) noexcept {
  DeviceSet peers;
  const Driver* const table = driver_if_loaded();
  const int count = peer_count(table);
  for (int other = 0; other < count; ++other) {
    if (other != device && devices.test(static_cast<size_t>(other)))
      peers[static_cast<size_t>(other)] = reaches(*table, other, device);
  }
  return peers;
}

void forget_peers() noexcept {
  for (auto& row : answers) {
    for (auto& answer : row) answer.store(0);
  }
}

}  // namespace ebbtide
