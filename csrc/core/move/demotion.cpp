#include "core/move/demotion.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "driver/context.h"
#include "driver/stream.h"

namespace ebbtide {
namespace {

void copy_range(CUdeviceptr to, CUdeviceptr from, size_t size_bytes, const Stream& stream) {
  check(driver().cuMemcpyDtoDAsync(to, from, size_bytes, stream.get()), "cuMemcpyDtoDAsync",
        "size=" + std::to_string(size_bytes));
}

}  // namespace

// torch may hand out memory of a leased tag at any moment, to a thread that would use it while it is not mapped.
TagClaim Demotion::claim() const {
  return {.tags = request_.tags,
          .concerns = [](const Allocation& allocation) { return allocation.wants_demotion(); },
          .leases = TagClaim::Leases::kRefused};
}

void Demotion::prepare(const Allocations& allocations) {
  if (driver().cuMemcpyDtoDAsync == nullptr) throw StateError("demote needs cuMemcpyDtoDAsync: update the driver");
  select(allocations);
  for (auto& [device, work] : work_) take_host_memory(device, work);
}

// In the order of addresses, whole handles as far as they fit into what is allowed.
void Demotion::select(const Allocations& allocations) {
  std::map<const Backing*, std::vector<Moving>> by_backing;
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    for (Chunk& chunk : allocation->chunks) {
      if (chunk.is_on_device() && chunk.is_resident()) by_backing[chunk.backing.get()].push_back({allocation, &chunk});
    }
  }
  std::vector<std::pair<const Backing*, std::vector<Moving>>> handles;
  for (auto& [backing, chunks] : by_backing) {
    // Of allocations that were named one by one: what others share stays.
    const bool has_others = chunks.size() < static_cast<size_t>(chunks.front().chunk->backing.use_count());
    if (!has_others || request_.tags.addresses.empty()) handles.emplace_back(backing, std::move(chunks));
  }
  std::sort(handles.begin(), handles.end(), [](const auto& one, const auto& other) {
    return one.first->mapping.address() < other.first->mapping.address();
  });
  uint64_t allowed_bytes = request_.max_bytes;
  for (auto& [backing, chunks] : handles) {
    const uint64_t size_bytes = backing->memory.size_bytes();
    if (size_bytes > allowed_bytes) continue;
    allowed_bytes -= size_bytes;
    const int device = chunks.front().allocation->device;
    work_[device].leaving.push_back({.chunks = std::move(chunks)});
  }
}

void Demotion::take_host_memory(int device, DeviceWork& work) {
  const ContextScope scope(device);
  work.peers = core().peers.of(device);
  work.spare = std::make_shared<Allocation>();
  work.spare->device = device;
  std::vector<uint64_t> sizes;
  uint64_t size_bytes = 0;
  for (Leaving& leaving : work.leaving) {
    leaving.first_spare = work.spare->chunks.size();
    for (const Moving& moving : leaving.chunks) {
      Chunk& spare = work.spare->chunks.emplace_back(work.spare->chunks.size(), size_bytes, moving.chunk->size_bytes);
      spare.place.store(Place::kDropped);
      size_bytes += spare.size_bytes;
      const HostTwin& twin = work.twins.emplace_back(core().host_pool.twins().take(moving.chunk->twin));
      moving.chunk->twin.reset();
      if (!twin.memory.has_handle()) sizes.push_back(spare.size_bytes);
    }
  }
  std::vector<HostPool::Handle> fresh = core().host_pool.take(device, sizes, "the demotion to host memory");
  auto next = fresh.begin();
  for (const HostTwin& twin : work.twins)
    work.memory.push_back(twin.memory.has_handle() ? HostPool::Handle() : std::move(*next++));
  work.spare->addresses = std::make_shared<const Addresses>(core().spare_addresses.take(size_bytes));
  work.clean_bytes.resize(work.twins.size());
  prepare_scan(device, work);
}

// Tells later what the chunks with a twin hold.
void Demotion::prepare_scan(int device, DeviceWork& work) {
  const SkipRules& skip = core().rules.skip;
  if (!skip.clean.load() || skip.must_compare.load()) return;
  size_t block_count = 0;
  for (const HostTwin& twin : work.twins) block_count += twin.digests.size();
  if (block_count == 0) return;
  try {
    work.engine = std::make_unique<EnginePool::Loan>(
        core().engines.borrow(device, copy_need(0, 0), {.table_bytes = BlockScan::table_bytes(block_count)}));
    work.scan = BlockScan::create(*work.engine, block_count, core().digest_seed);
  } catch (const StoreError&) {
    // No room for its tables: then all of it is copied.
  }
}

std::vector<int> Demotion::devices() const {
  std::vector<int> devices;
  for (const auto& [device, work] : work_) devices.push_back(device);
  return devices;
}

void Demotion::run_device(int device) {
  DeviceWork& work = work_.at(device);
  copy(device, work);
  for (const Leaving& leaving : work.leaving) remap(device, work, leaving);
}

// All copies are queued while later chunks are mapped: mapping host memory takes almost as long as copying it.
void Demotion::copy(int device, DeviceWork& work) {
  const Stream stream = Stream::create();
  std::vector<size_t> first_scanned = start_scan(work);
  for (const Leaving& leaving : work.leaving) {
    for (size_t index = 0; index < leaving.chunks.size(); ++index) {
      Chunk& spare = work.spare->chunks[leaving.first_spare + index];
      HostTwin& twin = work.twins[spare.index];
      HostPool::Handle& handle = work.memory[spare.index];
      const bool has_twin = twin.memory.has_handle();
      spare.backing->host_charge = std::move(has_twin ? twin.charge : handle.charge);
      spare.backing->memory = std::move(has_twin ? twin.memory : handle.memory);
      const CUdeviceptr to = work.spare->address() + spare.offset;
      spare.backing->mapping = Mapping::map(to, spare.backing->memory, device);
      const CUdeviceptr from = leaving.chunks[index].address();
      if (!has_twin || work.scan == nullptr) {
        copy_range(to, from, spare.size_bytes, stream);
        continue;
      }
      for (size_t block = 0; block < spare.block_count(); ++block) {
        const size_t offset = block * kernels::kBlockBytes;
        if (work.scan->report(first_scanned[spare.index] + block).digest == twin.digests[block]) {
          work.clean_bytes[spare.index] += kernels::kBlockBytes;
        } else {
          copy_range(to + offset, from + offset, kernels::kBlockBytes, stream);
        }
      }
    }
  }
  stream.synchronize();
}

// By chunk of the spare allocation: the number of its first block in the scan, if it has a twin.
std::vector<size_t> Demotion::start_scan(DeviceWork& work) {
  std::vector<size_t> first(work.twins.size());
  if (work.scan == nullptr) return first;
  for (const Leaving& leaving : work.leaving) {
    for (size_t index = 0; index < leaving.chunks.size(); ++index) {
      const size_t spare = leaving.first_spare + index;
      if (!work.twins[spare].memory.has_handle()) continue;
      first[spare] = work.scan->add(leaving.chunks[index].address(), leaving.chunks[index].chunk->size_bytes);
    }
  }
  work.scan->launch();
  return first;
}

// The bytes are in both memories, and whichever is mapped reads the same, until the device memory goes. From then on
// each chunk is whole in its host memory, mapped or not.
void Demotion::remap(int device, DeviceWork& work, const Leaving& leaving) {
  const auto spare_of = [&](size_t index) -> Chunk& { return work.spare->chunks[leaving.first_spare + index]; };
  const std::shared_ptr<Backing> old = leaving.chunks.front().chunk->backing;
  const CUdeviceptr address = old->mapping.address();
  for (size_t index = 0; index < leaving.chunks.size(); ++index) spare_of(index).backing->mapping.unmap();
  old->mapping.unmap();
  std::exception_ptr first_error;
  for (size_t index = 0; index < leaving.chunks.size(); ++index) {
    Backing& backing = *spare_of(index).backing;
    try {
      backing.mapping = core().peers.map(leaving.chunks[index].address(), backing.memory, device, work.peers);
    } catch (...) {
      if (index == 0 && map_back(device, work, *old, address)) throw;
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  note_released();
  for (size_t index = 0; index < leaving.chunks.size(); ++index) {
    const auto& [allocation, chunk] = leaving.chunks[index];
    chunk->backing = std::exchange(spare_of(index).backing, old);
    if (!chunk->backing->mapping.is_mapped()) chunk->is_detached.store(true, std::memory_order_release);
    chunk->home = Place::kHost;
    chunk->place.store(Place::kHost, std::memory_order_release);
    const uint64_t clean_bytes = work.clean_bytes[leaving.first_spare + index];
    row(*allocation).clean += clean_bytes;
    row(*allocation).copied += chunk->size_bytes - clean_bytes;
  }
  uint64_t freed_bytes = old->memory.size_bytes();
  old->release();
  for (size_t index = 0; index < leaving.chunks.size(); ++index) {
    const auto& [allocation, chunk] = leaving.chunks[index];
    spare_of(index).backing = Backing::nothing();
    row(*allocation).bytes += chunk->size_bytes;
    freed_bytes = saturating_subtract(freed_bytes, chunk->size_bytes);
  }
  // What was freed of the handle goes as well, and counts with the first.
  row(*leaving.chunks.front().allocation).bytes += freed_bytes;
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

bool Demotion::map_back(int device, const DeviceWork& work, Backing& backing, CUdeviceptr address) noexcept {
  try {
    backing.mapping = core().peers.map(address, backing.memory, device, work.peers);
    return true;
  } catch (...) {
    return false;
  }
}

void Demotion::settle() noexcept {
  for (auto& [device, work] : work_) {
    work.leaving.clear();
    work.twins.clear();  // of chunks that did not get there: their next demotion copies them
    work.scan.reset();
    work.engine.reset();
    core().host_pool.put_back(device, std::move(work.memory));
    if (work.spare != nullptr && work.spare->addresses != nullptr) core().deferred_frees.destroy(std::move(work.spare));
  }
  work_.clear();
}

}  // namespace ebbtide
