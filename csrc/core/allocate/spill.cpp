#include "core/allocate/spill.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/log_throttle.h"
#include "core/allocate/room.h"
#include "core/state/shortage.h"
#include "driver/bus.h"
#include "driver/context.h"
#include "policy/chunking.h"

namespace ebbtide {
namespace {

// Others may take memory that was free a moment ago: after so many looks, nothing is asked of the device.
constexpr int kLooks = 2;

policy::Placement place(const Policy& policy, uint64_t size_bytes, uint64_t room_bytes) {
  if (policy.overflow == Overflow::kNone) return {size_bytes, 0};
  if (policy.overflow == Overflow::kSplit) return policy::place_split(size_bytes, room_bytes);
  return policy::place_whole(size_bytes, room_bytes);
}

// The pieces of the part on the host. Where the host has none, and the device has room for the bytes that it was to be
// spared, all of it lies there.
std::vector<HostPool::Handle> take_host_memory(Core& core, const std::string& purpose, int device,
                                               policy::DeviceRoom room, policy::Placement& placement) {
  try {
    return core.host_pool.take(device, policy::cut_for_host(placement.host_bytes, granularity(device)), purpose);
  } catch (const StoreError&) {
    const uint64_t size_bytes = placement.device_bytes + placement.host_bytes;
    room.small_bytes = 0;
    if (size_bytes > policy::usable_bytes(room, size_bytes)) throw;
    placement = {size_bytes, 0};
    return {};
  }
}

// The budget is gone: one line, and the plain error of the call.
[[noreturn]] void throw_no_host_memory(const std::string& purpose, int device, uint64_t size_bytes,
                                       const StoreError& error) {
  static constinit LogThrottle throttle;
  const Shortage& host = error.shortage;
  if (throttle.allows()) log_line(LogLevel::kError, {"an allocation can't spill: ", error.what()});
  throw OutOfMemory("device " + std::to_string(device) + " has too little memory for " + purpose + " (" +
                        format_bytes(size_bytes) + "), and the host has too little for the rest: " + error.what(),
                    device, {size_bytes, saturating_add(free_device_bytes(device), host.free_bytes), host.limit_bytes},
                    error.cause);
}

void note_spill(Core& core, const std::string& purpose, int device, uint64_t size_bytes,
                const policy::Placement& placement) {
  if (!core.counters.note_spill(placement.host_bytes)) return;
  const auto location = host_location(device);
  log_line(LogLevel::kWarning,
           {"device ", std::to_string(device), " is full: ", format_bytes(placement.host_bytes), " of ",
            format_bytes(size_bytes), " of ", purpose, " lie in ", location ? describe(*location) : "host memory",
            ", which the device ", describe_reads(device), ". Said once; the statistics count on"});
}

}  // namespace

SpillResult build_spilling(Core& core, const AllocationRequest& request, bool may_spill) {
  const auto& [tag, policy, device, size_bytes] = request;
  const std::string purpose = "tag '" + tag.name + "'";
  const uint64_t freeing_steps = core.registry.ahead_steps.freeing_count();
  for (int look = 0;; ++look) {
    const policy::DeviceRoom room = look < kLooks ? look_at_device(core, device) : policy::DeviceRoom{};
    const uint64_t room_bytes = policy::usable_bytes(room, size_bytes);
    policy::Placement placement = place(policy, size_bytes, room_bytes);
    // Before anything spills: memory that was freed during a step of copies ahead is room at its end.
    if (placement.host_bytes > 0 && look == 0 &&
        (core.registry.ahead_steps.wait(AheadSteps::Which::kWithFreedMemory) ||
         core.registry.ahead_steps.freeing_count() != freeing_steps))
      continue;
    if (placement.host_bytes > 0 && !may_spill) return {nullptr, room_bytes};
    std::vector<HostPool::Handle> handles;
    try {
      handles = take_host_memory(core, purpose, device, room, placement);
    } catch (const StoreError& error) {
      throw_no_host_memory(purpose, device, size_bytes, error);
    }
    try {
      auto allocation = build_allocation(core, request, handles);
      if (placement.host_bytes > 0) note_spill(core, purpose, device, size_bytes, placement);
      return {std::move(allocation), room_bytes};
    } catch (const Error& error) {
      core.host_pool.put_back(device, std::move(handles));
      if (placement.device_bytes == 0 || !is_device_shortage(error)) throw;  // else others took the free memory
    }
  }
}

}  // namespace ebbtide
