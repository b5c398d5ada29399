#include "core/allocate/spill.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/repeated_line.h"
#include "core/state/saver.h"
#include "driver/bus.h"
#include "driver/context.h"
#include "policy/chunking.h"

namespace ebbtide {
namespace {

// Others may take what was free a moment ago: looked at anew so often, and then nothing is asked of the device.
constexpr int kLooks = 2;

struct MemoryInfo {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};

MemoryInfo memory_info(int device) {
  const ContextScope scope(device);
  MemoryInfo info;
  check(driver().cuMemGetInfo(&info.free_bytes, &info.total_bytes), "cuMemGetInfo");
  return info;
}

policy::Placement place(const Saver& saver, const Policy& policy, uint64_t size_bytes, uint64_t room_bytes) {
  if (policy.overflow == Overflow::kNone) return {size_bytes, 0};
  if (policy.overflow == Overflow::kSplit) return policy::place_split(size_bytes, room_bytes);
  return policy::place_whole(size_bytes, room_bytes, saver.overflow.whole_fraction.load());
}

// The pieces of what lies on the host. Where the host has none, and the device has room for what it was to be spared, all of it lies there.
std::vector<HostPool::Piece> take_pieces(Saver& saver, const std::string& purpose, int device, policy::DeviceRoom room,
                                         policy::Placement& placement) {
  try {
    return saver.host_pool.take(device, policy::cut_for_host(placement.host_bytes, granularity(device)), purpose);
  } catch (const StoreError&) {
    const uint64_t size_bytes = placement.device_bytes + placement.host_bytes;
    room.small_bytes = 0;
    if (size_bytes > policy::usable_bytes(room, size_bytes)) throw;
    placement = {size_bytes, 0};
    return {};
  }
}

Chunk& add_chunk(Allocation& allocation, size_t size_bytes) {
  auto& chunks = allocation.chunks;
  const size_t offset = chunks.empty() ? 0 : chunks.back().offset + chunks.back().size_bytes;
  return chunks.emplace_back(chunks.size(), offset, size_bytes);
}

std::shared_ptr<Allocation> assemble(Saver& saver, Tag& tag, const Policy& policy, int device, uint64_t device_bytes,
                                     std::vector<HostPool::Piece>& host_pieces) {
  auto allocation = std::make_shared<Allocation>();
  allocation->tag = &tag;
  allocation->policy = policy;
  allocation->device = device;
  uint64_t size_bytes = device_bytes;
  for (const HostPool::Piece& piece : host_pieces) size_bytes += piece.memory.size_bytes();
  DeviceCharge charge = saver.device_budget.claim(device, device_bytes);
  allocation->addresses = std::make_shared<const Addresses>(tag.arena(device).take(size_bytes));
  const bool has_backup = policy.backup != BackupKind::kNone;
  const DeviceSet peers = saver.peers.of(device);
  std::vector<uint64_t> device_chunks;
  if (device_bytes > 0) device_chunks = policy::cut_into_chunks(device_bytes, granularity(device), has_backup);
  for (const uint64_t chunk_bytes : device_chunks) {
    Chunk& chunk = add_chunk(*allocation, chunk_bytes);
    Backing& backing = *chunk.backing;
    backing.charge = charge.split(chunk_bytes);
    backing.memory = PhysicalMemory::create_on_device(chunk_bytes, device);
    backing.mapping = saver.peers.map(allocation->address() + chunk.offset, backing.memory, device, peers);
  }
  // All that can be refused for want of device memory is over: from here on the pieces are the chunks'.
  for (HostPool::Piece& piece : host_pieces) {
    Chunk& chunk = add_chunk(*allocation, piece.memory.size_bytes());
    chunk.place.store(Place::kHost);
    chunk.home = Place::kHost;
    Backing& backing = *chunk.backing;
    backing.host_claim = std::move(piece.claim);
    backing.memory = std::move(piece.memory);
    backing.mapping = saver.peers.map(allocation->address() + chunk.offset, backing.memory, device, peers);
  }
  return allocation;
}

// The budget is gone: one line, and the plain error of the call.
[[noreturn]] void throw_no_host_memory(const std::string& purpose, int device, uint64_t size_bytes,
                                       const StoreError& error) {
  static constinit RepeatedLine line;
  const Shortage& host = error.shortage;
  const bool is_over_budget = host.requested_bytes > host.free_bytes;  // else the driver or the system refused
  const bool is_said = line.must_say();
  if (is_said && is_over_budget) {
    log_line(LogLevel::kError,
             {purpose, " can't spill: ", format_bytes(host.requested_bytes), " of host memory needed, ",
              format_bytes(host.free_bytes), " free, limit ", format_bytes(host.limit_bytes)});
  } else if (is_said) {
    log_line(LogLevel::kError, {purpose, " can't spill: ", error.what()});
  }
  throw OutOfMemory("device " + std::to_string(device) + " has too little memory for " + purpose + " (" +
                        format_bytes(size_bytes) + "), and the host has too little for the rest: " + error.what(),
                    device, {size_bytes, saturating_add(free_device_bytes(device), host.free_bytes), host.limit_bytes});
}

void note_spill(Saver& saver, const std::string& purpose, int device, uint64_t size_bytes,
                const policy::Placement& placement) {
  if (!saver.counters.note_spill(placement.host_bytes)) return;
  const auto location = host_location(device);
  log_line(LogLevel::kWarning,
           {"device ", std::to_string(device), " is full: ", format_bytes(placement.host_bytes), " of ",
            format_bytes(size_bytes), " of ", purpose, " lie in ", location ? describe(*location) : "host memory",
            ", which the device ", describe_reads(device), ". Said once; saver.stats() counts on"});
}

bool is_shortage(const DriverError& error) { return error.code == CUDA_ERROR_OUT_OF_MEMORY; }

std::shared_ptr<Allocation> build_overflowing(Saver& saver, Tag& tag, const Policy& policy, int device,
                                              uint64_t size_bytes, bool may_spill) {
  const std::string purpose = "tag '" + tag.name + "'";
  for (int look = 0;; ++look) {
    const policy::DeviceRoom room = look < kLooks ? look_at_device(saver, device) : policy::DeviceRoom{};
    const uint64_t room_bytes = policy::usable_bytes(room, size_bytes);
    policy::Placement placement = place(saver, policy, size_bytes, room_bytes);
    if (placement.host_bytes > 0 && !may_spill) {
      throw FlushFirst("device " + std::to_string(device) + " has too little memory for " + purpose +
                           ": give back what is cached, and ask again",
                       device, {size_bytes, room_bytes, saver.device_budget.limit_bytes()});
    }
    std::vector<HostPool::Piece> pieces;
    try {
      pieces = take_pieces(saver, purpose, device, room, placement);
    } catch (const StoreError& error) {
      throw_no_host_memory(purpose, device, size_bytes, error);
    }
    try {
      auto allocation = assemble(saver, tag, policy, device, placement.device_bytes, pieces);
      if (placement.host_bytes > 0) note_spill(saver, purpose, device, size_bytes, placement);
      return allocation;
    } catch (const OutOfMemory&) {
      saver.host_pool.put_back(device, std::move(pieces));
      if (placement.device_bytes == 0) throw;
    } catch (const DriverError& error) {
      saver.host_pool.put_back(device, std::move(pieces));
      if (placement.device_bytes == 0 || !is_shortage(error)) throw;
    }
  }
}

}  // namespace

policy::DeviceRoom look_at_device(Saver& saver, int device) {
  const MemoryInfo info = memory_info(device);
  return {.free_bytes = info.free_bytes,
          .reserve_bytes = saver.overflow.reserve_of(info.total_bytes),
          .budget_bytes = saver.device_budget.available_bytes(device),
          .small_bytes = saver.overflow.room_for_small(saver.device_budget.limit_bytes()),
          .granularity_bytes = granularity(device)};
}

uint64_t usable_device_bytes(Saver& saver, int device, uint64_t allocation_bytes) {
  return policy::usable_bytes(look_at_device(saver, device), allocation_bytes);
}

std::shared_ptr<Allocation> build_allocation(Saver& saver, Tag& tag, const Policy& policy, int device,
                                             uint64_t size_bytes, bool may_spill) {
  if (policy.overflow != Overflow::kNone) return build_overflowing(saver, tag, policy, device, size_bytes, may_spill);
  std::vector<HostPool::Piece> none;
  return assemble(saver, tag, policy, device, size_bytes, none);
}

}  // namespace ebbtide
