#include "core/move/promotion.h"

#include <string>

#include "base/error.h"
#include "core/allocate/room.h"
#include "core/state/shortage.h"
#include "driver/context.h"
#include "driver/stream.h"

namespace ebbtide {

TagClaim Promotion::claim() const {
  return {.tags = request_.tags,
          .concerns = [](const Allocation& allocation) { return allocation.wants_promotion(); },
          .leases = TagClaim::Leases::kRefused};
}

void Promotion::prepare(const Allocations& allocations) {
  if (driver().cuMemcpyDtoDAsync == nullptr) throw StateError("promote needs cuMemcpyDtoDAsync: update the driver");
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    for (Chunk& chunk : allocation->chunks) {
      if (chunk.is_on_host() && chunk.is_resident()) work_[allocation->device].moving.push_back({allocation, &chunk});
    }
  }
  for (auto& [device, work] : work_) {
    create_memory(device, work);
    if (request_.keeps_host && core().rules.skip.clean.load() && !work.moving.empty()) prepare_scan(device, work);
  }
}

void Promotion::prepare_scan(int device, DeviceWork& work) {
  const ContextScope scope(device);
  try {
    const size_t block_count = work.spare->chunks.back().end_block();
    work.engine = std::make_unique<EnginePool::Loan>(
        core().engines.borrow(device, copy_need(0, 0), {.table_bytes = BlockScan::table_bytes(block_count)}));
    work.scan = BlockScan::create(*work.engine, block_count, core().digest_seed);
  } catch (const StoreError&) {
    // No room for its tables: then the host memory is not kept.
  }
}

void Promotion::note_stop(int device, uint64_t chunk_bytes, uint64_t usable_bytes) {
  note_ += (note_.empty() ? "" : "; ") + ("device " + std::to_string(device)) + ": the next chunk has " +
           format_bytes(chunk_bytes) + ", and promotions may use " + format_bytes(usable_bytes) + " more";
}

// As much as there is: the oldest first.
void Promotion::create_memory(int device, DeviceWork& work) {
  const ContextScope scope(device);
  work.spare = std::make_shared<Allocation>();
  work.spare->device = device;
  work.peers = core().peers.of(device);
  policy::DeviceRoom room = look_at_device(core(), device);
  uint64_t size_bytes = 0;
  for (const Moving& moving : work.moving) {
    const uint64_t chunk_bytes = moving.chunk->size_bytes;
    if (chunk_bytes > request_.max_bytes - size_bytes) break;
    const uint64_t usable_bytes = policy::usable_bytes(room, moving.allocation->size_bytes());
    if (chunk_bytes > usable_bytes) {
      note_stop(device, chunk_bytes, usable_bytes);
      break;
    }
    auto& chunks = work.spare->chunks;
    Chunk& chunk = chunks.emplace_back(chunks.size(), size_bytes, chunk_bytes);
    chunk.place.store(Place::kDropped);
    try {
      chunk.backing->charge = core().budgets.device.charge(device, chunk_bytes);
      chunk.backing->memory = PhysicalMemory::create_on_device(chunk_bytes, device);
    } catch (const Error& error) {
      chunks.pop_back();
      if (!is_device_shortage(error)) throw;
      note_stop(device, chunk_bytes, 0);
      break;
    }
    room.take(chunk_bytes);
    size_bytes += chunk_bytes;
  }
  work.moving.resize(work.spare->chunks.size());
  if (size_bytes > 0)
    work.spare->addresses = std::make_shared<const Addresses>(core().spare_addresses.take(size_bytes));
}

std::vector<int> Promotion::devices() const {
  std::vector<int> devices;
  for (const auto& [device, work] : work_) {
    if (!work.moving.empty()) devices.push_back(device);
  }
  return devices;
}

void Promotion::run_device(int device) {
  DeviceWork& work = work_.at(device);
  copy(device, work);
  for (size_t index = 0; index < work.moving.size(); ++index) remap(device, work, index);
}

void Promotion::copy(int device, DeviceWork& work) {
  const Stream stream = Stream::create();
  for (size_t index = 0; index < work.moving.size(); ++index) {
    const Moving& moving = work.moving[index];
    Chunk& spare = work.spare->chunks[index];
    const CUdeviceptr to = work.spare->address() + spare.offset;
    spare.backing->mapping = Mapping::map(to, spare.backing->memory, device);
    check(driver().cuMemcpyDtoDAsync(to, moving.allocation->address() + moving.chunk->offset, spare.size_bytes,
                                     stream.get()),
          "cuMemcpyDtoDAsync", "size=" + std::to_string(spare.size_bytes));
  }
  stream.synchronize();
  if (work.scan == nullptr) return;
  for (const Chunk& spare : work.spare->chunks) work.scan->add(work.spare->address() + spare.offset, spare.size_bytes);
  work.scan->launch();
  // Waits for the last: the blocks lose this address next.
  for (size_t block = 0; block < work.spare->chunks.back().end_block(); ++block) work.scan->report(block);
}

// Of a chunk that has come: what lies behind the spare address is the memory that it came from.
void Promotion::keep_host_memory(DeviceWork& work, size_t index) noexcept {
  Chunk& chunk = *work.moving[index].chunk;
  Chunk& spare = work.spare->chunks[index];
  try {
    HostTwin twin;
    for (size_t block = spare.first_block(); block < spare.end_block(); ++block)
      twin.digests.push_back(work.scan->report(block).digest);
    twin.charge = std::move(spare.backing->host_charge);
    twin.memory = std::move(spare.backing->memory);
    chunk.twin = core().host_pool.twins().keep(std::move(twin));
  } catch (const std::exception&) {
    // It goes to the system.
  }
}

// The bytes are in both memories: whichever is mapped in the end, the address reads the same.
void Promotion::remap(int device, DeviceWork& work, size_t index) {
  const Moving& moving = work.moving[index];
  Chunk& chunk = *moving.chunk;
  Chunk& spare = work.spare->chunks[index];
  const CUdeviceptr address = moving.allocation->address() + chunk.offset;
  spare.backing->mapping.unmap();
  chunk.backing->mapping.unmap();
  try {
    chunk.backing->mapping = core().peers.map(address, spare.backing->memory, device, work.peers);
  } catch (...) {
    try {
      chunk.backing->mapping = core().peers.map(address, chunk.backing->memory, device, work.peers);
    } catch (...) {
      note_released();
      chunk.is_detached.store(true, std::memory_order_release);
    }
    throw;
  }
  note_released();
  std::swap(chunk.backing->memory, spare.backing->memory);
  spare.backing->host_charge = std::move(chunk.backing->host_charge);
  chunk.backing->charge = std::move(spare.backing->charge);
  chunk.home = Place::kDevice;
  chunk.place.store(Place::kDevice, std::memory_order_release);
  ReportRow& entry = row(*moving.allocation);
  entry.bytes += chunk.size_bytes;
  entry.copied += chunk.size_bytes;
  if (work.scan != nullptr) keep_host_memory(work, index);
  if (core().host_pool.capacity_bytes() == 0 || !spare.backing->has_memory()) return;
  try {
    // Behind the spare address the pool can clear it.
    spare.backing->mapping = Mapping::map(work.spare->address() + spare.offset, spare.backing->memory, device);
  } catch (...) {
    // Then it goes to the system.
  }
}

void Promotion::settle() noexcept {
  for (auto& [device, work] : work_) {
    work.moving.clear();
    work.scan.reset();
    work.engine.reset();
    if (work.spare != nullptr) core().deferred_frees.destroy(std::move(work.spare));
  }
  work_.clear();
}

}  // namespace ebbtide
