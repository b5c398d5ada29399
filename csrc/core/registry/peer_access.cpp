#include "core/registry/peer_access.h"

#include <algorithm>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/log_throttle.h"

namespace ebbtide {
namespace {

void say_refused(CUresult result) noexcept {
  static constinit LogThrottle throttle;
  if (!throttle.allows()) return;
  log_line(LogLevel::kWarning,
           {"cuMemSetAccess for the peers of a device failed with ", result_name(result),
            ": a copy or kernel of another device can't use this memory. Entering a region again tries again"});
}

bool is_any_missing(const Allocation& allocation, const DeviceSet& peers) {
  return std::any_of(allocation.chunks.begin(), allocation.chunks.end(),
                     [&](const Chunk& chunk) { return chunk.backing->mapping.missing(peers).any(); });
}

}  // namespace

uint64_t PeerAccess::look() noexcept {
  const DeviceSet live = live_devices();
  const std::lock_guard lock(mutex_);
  const DeviceSet now = live | enabled_;
  if ((now & ~live_).any()) ++generation_;
  live_ = now;
  return generation_.load();
}

DeviceSet PeerAccess::of(int device) noexcept {
  DeviceSet live;
  {
    const std::lock_guard lock(mutex_);
    live = live_;
  }
  return live.any() ? peers_of(device, live) : DeviceSet{};
}

uint64_t PeerAccess::refresh(bool must_retry) noexcept {
  const uint64_t generation = look();
  if (must_retry && has_refused_.load()) visited_.store(0);
  catch_up(generation);
  return generation;
}

void PeerAccess::catch_up(uint64_t seen) noexcept {
  const uint64_t now = generation_.load();
  if (now == 0 || (seen == now && visited_.load() >= now)) return;
  if (const CUresult result = grant_all(); result != CUDA_SUCCESS) say_refused(result);
}

void PeerAccess::catch_up_after_hold(uint64_t seen) noexcept {
  if (!is_any_left_.load()) return catch_up(seen);
  if (const CUresult result = grant_all(); result != CUDA_SUCCESS) say_refused(result);
}

void PeerAccess::enable(int device) {
  {
    const std::lock_guard lock(mutex_);
    const DeviceSet enabled = only(device);
    if ((enabled & ~live_).any()) ++generation_;
    enabled_ |= enabled;
    live_ |= enabled;
  }
  look();
  check(grant_all(), "cuMemSetAccess", "for peers, as device " + std::to_string(device) + " enabled access");
}

// The first refusal of all.
CUresult PeerAccess::grant_all() noexcept {
  std::vector<std::shared_ptr<Allocation>> doomed;
  CUresult first = CUDA_SUCCESS;
  {
    const std::lock_guard lock(visit_mutex_);
    const uint64_t generation = generation_.load();
    is_any_left_.store(true);  // before an operation is left out, which may let go at once
    try {
      std::map<int, DeviceSet> peers;  // asked for before the registry's lock is held
      for (int device = 0; device < kMaxDevices; ++device) peers[device] = of(device);
      Selection selection = registry_.claim_idle(
          [&](const Allocation& allocation) { return is_any_missing(allocation, peers.at(allocation.device)); });
      is_any_left_.store(selection.has_left_any);
      for (const auto& allocation : selection.groups.front().allocations) {
        const CUresult result = grant(*allocation);
        if (first == CUDA_SUCCESS) first = result;
      }
      doomed = registry_.release(selection, Outcome::kUntouched);
    } catch (const std::bad_alloc&) {
      first = CUDA_ERROR_OUT_OF_MEMORY;  // nothing is held yet
    }
    if (first != CUDA_SUCCESS) has_refused_.store(true);
    visited_.store(generation);
  }
  frees_.destroy_all(std::move(doomed));
  return first;
}

CUresult PeerAccess::grant(Allocation& allocation) noexcept {
  const DeviceSet peers = of(allocation.device);
  CUresult first = CUDA_SUCCESS;
  for (Chunk& chunk : allocation.chunks) {
    if (!chunk.backing->mapping.is_mapped()) continue;
    const CUresult result = chunk.backing->mapping.grant(peers);
    if (first == CUDA_SUCCESS) first = result;
  }
  return first;
}

Mapping PeerAccess::map(CUdeviceptr address, const PhysicalMemory& memory, int device, const DeviceSet& peers) {
  Mapping mapping = Mapping::map(address, memory, device, peers);
  if (const CUresult result = mapping.grant(peers); result != CUDA_SUCCESS) {
    has_refused_.store(true);
    say_refused(result);
  }
  return mapping;
}

}  // namespace ebbtide
