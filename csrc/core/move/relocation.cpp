#include "core/move/relocation.h"

#include <exception>
#include <string>
#include <utility>

#include "base/error.h"

namespace ebbtide {

std::vector<Relocation::Sources> Relocation::by_handle(const Allocations& allocations) {
  std::map<CUdeviceptr, Sources> by_address;
  for (const auto& allocation : allocations) {
    for (Chunk& chunk : allocation->chunks) {
      if (chunk.is_on_device() && chunk.is_resident())
        by_address[chunk.backing->mapping.address()].push_back({allocation, &chunk});
    }
  }
  std::vector<Sources> handles;
  for (auto& [address, sources] : by_address) handles.push_back(std::move(sources));
  return handles;
}

void Relocation::add_spare(Batch& batch, Source& source) const {
  if (batch.spare == nullptr) batch.spare = std::make_shared<Allocation>();
  batch.spare->device = source.allocation->device;
  source.spare = &batch.spare->add_chunk(source.chunk->size_bytes);
  source.spare->place.store(Place::kDropped);
}

void Relocation::add_device_spare(Batch& batch, Source& source) {
  const int device = source.allocation->device;
  DeviceCharge charge = core().budgets.device.charge(device, source.chunk->size_bytes);
  PhysicalMemory memory =
      PhysicalMemory::create_on_device(source.chunk->size_bytes, device, source.allocation->policy.is_exportable);
  add_spare(batch, source);
  source.spare->backing->charge = std::move(charge);
  source.spare->backing->memory = std::move(memory);
}

void Relocation::reserve_addresses(Batch& batch) {
  const Chunk& last = batch.spare->chunks.back();
  batch.spare->addresses =
      std::make_shared<const Addresses>(core().spare_addresses.take(last.offset + last.size_bytes));
}

void Relocation::make_scan(int device, Batch& batch, size_t block_count) {
  try {
    batch.engine = std::make_unique<EnginePool::Loan>(
        core().engines.borrow(device, copy_need(0, 0), {.table_bytes = BlockScan::table_bytes(block_count)}));
    batch.scan = BlockScan::create(*batch.engine, block_count, core().digest_seed);
  } catch (const StoreError&) {
    // No room for its tables.
  }
}

void Relocation::run_device(int device) {
  for (Batch& batch : batches_.at(device)) {
    if (!begin(device, batch)) return;
    copy_all(device, batch);
    for (const Sources& sources : batch.handles) remap(device, batch, sources);
  }
}

void Relocation::copy_range(CUdeviceptr to, CUdeviceptr from, size_t size_bytes, const Stream& stream) {
  check(driver().cuMemcpyDtoDAsync(to, from, size_bytes, stream.get()), "cuMemcpyDtoDAsync",
        "size=" + std::to_string(size_bytes));
}

void Relocation::copy(const Batch& batch, Source& source, const Stream& stream) {
  copy_range(batch.spare->address() + source.spare->offset, source.address(), source.chunk->size_bytes, stream);
}

void Relocation::map_spare(int device, const Batch& batch, const Source& source) {
  Backing& backing = *source.spare->backing;
  if (backing.mapping.is_mapped()) return;
  backing.mapping = Mapping::map(batch.spare->address() + source.spare->offset, backing.memory, device);
}

// All copies are queued while later chunks are mapped: mapping host memory takes almost as long as copying it.
void Relocation::copy_all(int device, Batch& batch) {
  const Stream stream = Stream::create();
  for (Sources& sources : batch.handles) {
    for (Source& source : sources) {
      map_spare(device, batch, source);
      copy(batch, source, stream);
    }
  }
  stream.synchronize();
  note_copied(batch);
}

// The bytes are in both memories, and whichever is mapped reads the same.
void Relocation::remap(int device, Batch& batch, const Sources& sources) {
  const DeviceSet peers = core().peers.of(device);
  const std::shared_ptr<Backing> old = sources.front().chunk->backing;
  const CUdeviceptr old_address = old->mapping.address();
  for (const Source& source : sources) source.spare->backing->mapping.unmap();
  old->mapping.unmap();
  const auto try_map = [&](CUdeviceptr address, Backing& backing) noexcept -> std::exception_ptr {
    try {
      backing.mapping = core().peers.map(address, backing.memory, device, peers);
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  };
  std::exception_ptr error;
  for (const Source& source : sources) {
    const std::exception_ptr failure = try_map(source.address(), *source.spare->backing);
    const bool is_first = &source == &sources.front();
    if (failure != nullptr && is_first && try_map(old_address, *old) == nullptr) std::rethrow_exception(failure);
    if (error == nullptr) error = failure;
  }
  note_released();
  for (const Source& source : sources) {
    Chunk& chunk = *source.chunk;
    chunk.backing = std::exchange(source.spare->backing, Backing::nothing());
    if (!chunk.backing->mapping.is_mapped()) chunk.is_detached.store(true, std::memory_order_release);
    chunk.home = place_;
    chunk.place.store(place_, std::memory_order_release);
    ReportRow& entry = row(*source.allocation);
    entry.clean += source.clean_bytes;
    entry.copied += chunk.size_bytes - source.clean_bytes;
  }
  note_moved(device, batch, sources, old);
  if (error != nullptr) std::rethrow_exception(error);
}

void Relocation::settle() noexcept {
  for (auto& [device, batches] : batches_) {
    for (Batch& batch : batches) {
      batch.scan.reset();
      if (batch.spare != nullptr) core().deferred_frees.destroy(std::move(batch.spare));
    }
  }
  batches_.clear();
}

}  // namespace ebbtide
