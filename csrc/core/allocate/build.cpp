#include "core/allocate/build.h"

#include <algorithm>

#include "driver/context.h"
#include "policy/chunking.h"

namespace ebbtide {
namespace {

uint64_t chunk_bytes_of(const Policy& policy) {
  const uint64_t bytes = policy.is_exportable                 ? policy::kExportableChunkBytes
                         : policy.backup == BackupKind::kNone ? policy::kDroppedChunkBytes
                                                              : policy::kCopiedChunkBytes;
  return std::min(bytes, PhysicalMemory::most_bytes());
}

void add_device_chunks(Core& core, Allocation& allocation, DeviceCharge charge, const DeviceSet& peers) {
  if (charge.size_bytes() == 0) return;
  const int device = allocation.device;
  const Policy& policy = allocation.policy;
  for (const uint64_t chunk_bytes : policy::cut_into_chunks(charge.size_bytes(), granularity(device),
                                                            chunk_bytes_of(policy), PhysicalMemory::most_bytes())) {
    Chunk& chunk = allocation.add_chunk(chunk_bytes);
    Backing& backing = *chunk.backing;
    backing.charge = charge.split(chunk_bytes);
    backing.memory = PhysicalMemory::create_on_device(chunk_bytes, device, policy.is_exportable);
    backing.mapping = core.peers.map(allocation.address() + chunk.offset, backing.memory, device, peers);
  }
}

void add_host_chunk(Core& core, Allocation& allocation, HostPool::Handle& handle, const DeviceSet& peers) {
  Chunk& chunk = allocation.add_chunk(handle.memory.size_bytes());
  chunk.place.store(Place::kHost);
  chunk.home = Place::kHost;
  Backing& backing = *chunk.backing;
  backing.host_charge = std::move(handle.charge);
  backing.memory = std::move(handle.memory);
  backing.mapping = core.peers.map(allocation.address() + chunk.offset, backing.memory, allocation.device, peers);
}

}  // namespace

std::shared_ptr<Allocation> build_allocation(Core& core, const AllocationRequest& request,
                                             std::vector<HostPool::Handle>& host_memory) {
  auto allocation = std::make_shared<Allocation>();
  allocation->tag = &request.tag;
  allocation->policy = request.policy;
  allocation->device = request.device;
  uint64_t device_bytes = request.size_bytes;
  for (const HostPool::Handle& handle : host_memory) device_bytes -= handle.memory.size_bytes();
  DeviceCharge charge = core.budgets.device.charge_provisionally(request.device, device_bytes);
  allocation->addresses = std::make_shared<const Addresses>(request.tag.arena(request.device).take(request.size_bytes));
  const DeviceSet peers = core.peers.of(request.device);
  {
    const DeviceMargin::Hold hold = core.budgets.device_margin.require_room(request.device, device_bytes);
    add_device_chunks(core, *allocation, std::move(charge), peers);
  }
  // All that can be refused for want of device memory is over.
  core.budgets.device.note_peak(request.device);
  for (HostPool::Handle& handle : host_memory) add_host_chunk(core, *allocation, handle, peers);
  return allocation;
}

}  // namespace ebbtide
