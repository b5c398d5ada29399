// The memory of returning chunks: which share a handle, where it is made, how it is mapped, and how it is undone where
// it was not used.
#include <algorithm>

#include "base/error.h"
#include "core/allocate/room.h"
#include "core/resume/resume.h"
#include "core/state/shortage.h"
#include "driver/context.h"
#include "policy/chunking.h"

namespace ebbtide {

// Whether two chunks that lie side by side may leave and return together. Allocations that are freed one by one, so
// that others may have their memory, do not share it; nor does unused memory, which a trim may want, nor what other
// processes may have, who would have the neighbours as well.
bool Resume::may_share(const ReturningChunk& one, const ReturningChunk& other) {
  const auto is_alone = [](const ReturningChunk& each) {
    return each.is_on_host || each.chunk->is_detached.load() || each.allocation().policy.is_exportable;
  };
  if (is_alone(one) || is_alone(other)) return false;
  if (one.of == other.of) return true;
  const auto is_freed_with_its_pool = [](const ReturningChunk& each) {
    const Policy& policy = each.allocation().policy;
    return policy.overflow == Overflow::kNone && !policy.is_freed_singly;
  };
  return one.allocation().policy == other.allocation().policy && is_freed_with_its_pool(one) &&
         is_freed_with_its_pool(other) && !one.allocation().is_unused && !other.allocation().is_unused &&
         one.allocation().addresses->is_of_one_reservation_with(*other.allocation().addresses);
}

void Resume::group(DeviceWork& work) {
  auto& returning = work.returning;
  std::vector<policy::Extent> handles;
  handles.reserve(returning.size());
  for (const ReturningChunk& each : returning) handles.push_back({each.address(), each.chunk->size_bytes});
  uint64_t most_bytes =
      policy::most_shared_bytes(work.copied_bytes, work.bytes, core().rules.shared_handle_bytes.load());
  if (std::any_of(returning.begin(), returning.end(),
                  [](const ReturningChunk& each) { return each.allocation().tag->was_swapped.load(); }))
    most_bytes = std::min(most_bytes, policy::kSharedInSwapBytes);
  most_bytes = std::min(most_bytes, PhysicalMemory::most_bytes());
  auto members = policy::group_neighbours(
      handles, most_bytes, [&](size_t one, size_t other) { return may_share(returning[one], returning[other]); });
  const auto first_of = [](const std::vector<size_t>& each) { return *std::min_element(each.begin(), each.end()); };
  std::sort(members.begin(), members.end(),
            [&](const auto& one, const auto& other) { return first_of(one) < first_of(other); });
  work.groups.reserve(members.size());
  for (auto& each : members) {
    const ReturningChunk& first = returning[each.front()];
    Group group;  // settle() sees whole ones only
    group.address = first.address();
    group.is_on_host = first.is_on_host;
    group.is_detached = first.chunk->is_detached.load();
    group.is_fresh = group.is_fresh || group.is_detached;
    group.is_exportable = first.allocation().policy.is_exportable;
    group.backing = group.is_detached ? first.chunk->backing : std::make_shared<Backing>();
    group.missing = each.size();
    for (const size_t index : each) {
      returning[index].group = work.groups.size();
      group.size_bytes += handles[index].size_bytes;
    }
    group.members = std::move(each);
    work.groups.push_back(std::move(group));
  }
  // Nothing below throws.
  for (const Group& group : work.groups) {
    for (const size_t index : group.members) returning[index].chunk->backing = group.backing;
  }
}

void Resume::try_create_memory(int device, DeviceWork& work) {
  const ContextScope scope(device);
  DeviceCharge charge = core().budgets.device.charge(device, work.bytes);
  for (const Group& group : work.groups) {
    if (!group.wants_device_memory()) continue;
    group.backing->charge = charge.split(group.size_bytes);
    group.backing->memory = PhysicalMemory::create_on_device(group.size_bytes, device, group.is_exportable);
  }
}

// Chunks that lay on the host when they were dropped come back on the device as far as that leaves the reserve free.
void Resume::create_memory_by_room(int device, DeviceWork& work) {
  const ContextScope scope(device);
  std::optional<policy::DeviceRoom> room;
  for (Group& group : work.groups) {
    if (!group.is_on_host || group.is_detached) continue;
    if (!room) room = look_at_device(core(), device);
    const uint64_t allocation_bytes = work.returning[group.members.front()].allocation().size_bytes();
    if (group.size_bytes > policy::usable_bytes(*room, allocation_bytes)) continue;
    try {
      group.backing->charge = core().budgets.device.charge(device, group.size_bytes);
      group.backing->memory = PhysicalMemory::create_on_device(group.size_bytes, device, group.is_exportable);
    } catch (const Error& error) {
      group.backing->charge.reset();
      if (!is_device_shortage(error)) throw;
      return;
    }
    group.is_on_host = false;
    work.bytes += group.size_bytes;
    room->take(group.size_bytes);
  }
}

void Resume::create_host_memory(int device, DeviceWork& work) {
  std::vector<uint64_t> sizes;
  for (const Group& group : work.groups) {
    if (group.is_on_host && !group.is_detached) sizes.push_back(group.size_bytes);
  }
  auto handles = core().host_pool.take(device, sizes, "the resume of memory on the host");
  auto handle = handles.begin();
  for (const Group& group : work.groups) {
    if (!group.is_on_host || group.is_detached) continue;
    group.backing->host_charge = std::move(handle->charge);
    group.backing->memory = std::move(handle->memory);
    ++handle;
  }
}

void Resume::create_memory(int device, DeviceWork& work) {
  LastResort last_resort(core(), true);
  try {
    retry_when_short(last_resort, device, work.bytes, [&] {
      try {
        try_create_memory(device, work);
      } catch (const Error&) {
        give_back_unused(work);
        throw;
      }
    });
  } catch (const DriverError& error) {
    rethrow_shortage(error, core().budgets.device, device, work.bytes, "resume");
  }
}

std::map<int, std::vector<HandleKind>> Resume::returning_handles() const {
  std::map<int, std::vector<HandleKind>> handles;
  for (const auto& [device, work] : work_) {
    for (const Group& group : work.groups) {
      if (group.wants_device_memory()) handles[device].push_back(group.kind());
    }
  }
  return handles;
}

void Resume::map(int device, DeviceWork& work, Group& group) {
  Backing& backing = *group.backing;
  if (group.wants_device_memory()) {
    if (auto taken = take_memory(device, group.kind())) {
      backing.charge = std::move(taken->charge);
      backing.memory = std::move(taken->memory);
      group.is_fresh = taken->is_fresh;
    }
  }
  for (const size_t index : group.members) {
    if (group.members.size() > 1) backing.addresses.push_back(work.returning[index].allocation().addresses);
  }
  backing.mapping = core().peers.map(group.address, backing.memory, device, work.peers);
}

// Memory that was created or mapped and did not become resident goes back: no caller has seen it. But if work may still
// be queued into it, it stays behind the chunks, as stale memory, until a
// synchronisation succeeds.
void Resume::give_back_unused(DeviceWork& work) noexcept {
  if (work.is_in_doubt || (work.engine && work.engine->engine().is_poisoned())) return;
  for (const Group& group : work.groups) {
    if (work.returning[group.members.front()].chunk->is_resident()) continue;
    Backing& backing = *group.backing;
    backing.mapping = Mapping{};
    if (group.is_detached) continue;  // its bytes are in it
    backing.memory = PhysicalMemory{};
    backing.charge.reset();
    backing.host_charge.reset();
    backing.addresses.clear();
  }
}

}  // namespace ebbtide
