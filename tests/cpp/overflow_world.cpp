#include "overflow_world.h"

#include <numeric>

#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

uint64_t seed_of(size_t item, size_t block) { return 5000 * (item + 1) + block; }

}  // namespace

CUdeviceptr OverflowWorld::alloc_with(const std::string& tag, const Policy& policy, uint64_t size_bytes, int device) {
  return allocate(core(), core().registry.tag(tag), policy, device, size_bytes);
}

size_t OverflowWorld::spill(const std::string& tag, const Policy& policy, uint64_t device_bytes, uint64_t host_bytes,
                            int device) {
  core().budgets.device.set_limit(core().budgets.device.held_bytes(device) + device_bytes);
  const uint64_t size_bytes = device_bytes + host_bytes;
  items_.push_back({tag, device, alloc_with(tag, policy, size_bytes, device), size_bytes,
                    std::vector<bool>(size_bytes / kChunk, false)});
  core().budgets.device.set_limit(kUnlimited);
  fill_item(items_.size() - 1);
  return items_.size() - 1;
}

size_t OverflowWorld::make(const std::string& tag, const Policy& policy, const std::vector<uint64_t>& chunks,
                           int device) {
  std::vector<uint64_t> sizes;
  uint64_t size_bytes = 0;
  for (const uint64_t count : chunks) {
    sizes.push_back(count * kChunk);
    size_bytes += sizes.back();
  }
  items_.push_back({tag, device, alloc_chunks(tag, policy, device, sizes), size_bytes,
                    std::vector<bool>(size_bytes / kChunk, false)});
  fill_item(items_.size() - 1);
  return items_.size() - 1;
}

void OverflowWorld::fill_item(size_t index) {
  Item& item = items_[index];
  for (size_t block = 0; block < item.is_blank.size(); ++block) {
    fill(item.address + block * kChunk, kChunk, seed_of(index, block));
    item.is_blank[block] = false;
  }
}

void OverflowWorld::free_all() {
  for (const Item& item : items_) deallocate(core(), item.address);
  items_.clear();
}

uint64_t OverflowWorld::spilled_bytes() {
  uint64_t bytes = 0;
  for (size_t index = 0; index < items_.size(); ++index) bytes += host_bytes(index);
  return bytes;
}

Report OverflowWorld::run_at(OperationKind kind, const std::vector<std::string>& tags,
                             const std::vector<CUdeviceptr>& addresses) {
  OperationRequest request;
  request.tags.names = tags;
  request.tags.addresses = addresses;
  return Operation::claim(core(), kind, std::move(request))->commit().front();
}

Report OverflowWorld::trim(const std::vector<std::string>& tags, const std::vector<CUdeviceptr>& addresses) {
  return run_at(OperationKind::kTrim, tags, addresses);
}

Report OverflowWorld::resume_at(const std::vector<std::string>& tags, const std::vector<CUdeviceptr>& addresses) {
  return run_at(OperationKind::kResume, tags, addresses);
}

void OverflowWorld::note_dropped() {
  for (size_t index = 0; index < items_.size(); ++index) {
    for (const Chunk& chunk : find(index).chunks) {
      if (chunk.place.load() != Place::kDropped) continue;
      for (size_t block = 0; block < chunk.block_count(); ++block)
        items_[index].is_blank[chunk.first_block() + block] = true;
    }
  }
}

void OverflowWorld::expect_chunk_sound(const Item& item, size_t index, const Chunk& chunk, const BackupRecord* stored) {
  SCOPED_TRACE(item.tag + ", chunk " + std::to_string(chunk.index));
  const bool is_host_memory = chunk.backing->memory.is_on_host();
  const uint64_t held_bytes = chunk.backing->memory.size_bytes();
  EXPECT_EQ(chunk.backing->charge.size_bytes(), is_host_memory ? 0 : held_bytes);
  EXPECT_EQ(chunk.backing->host_charge.size_bytes(), is_host_memory ? held_bytes : 0);
  if (chunk.is_resident()) {
    EXPECT_EQ(is_host_memory, chunk.is_on_host());
    ASSERT_TRUE(chunk.backing->mapping.is_mapped());
  }
  if (chunk.is_detached.load()) {
    EXPECT_TRUE(chunk.backing->memory.has_handle());
    EXPECT_FALSE(chunk.backing->mapping.is_mapped());
  }
  for (size_t block = chunk.first_block(); block < chunk.first_block() + chunk.block_count(); ++block) {
    const bool is_stored = chunk.place.load() == Place::kStored;
    if (!chunk.is_resident() && !is_stored) continue;
    CUdeviceptr at = item.address + block * kChunk;
    if (is_stored) {
      ASSERT_NE(stored, nullptr);
      ASSERT_FALSE(stored->blocks[block].is_constant);
      at = reinterpret_cast<CUdeviceptr>(stored->backup->view() + block * kChunk);
    }
    EXPECT_TRUE(item.is_blank[block] ? is_zero(at, kChunk) : holds(at, kChunk, seed_of(index, block)));
  }
}

void OverflowWorld::expect_sound(const std::string& when) {
  SCOPED_TRACE(when);
  note_dropped();
  std::vector<uint64_t> device_bytes(kDevices, 0);
  const std::vector<uint64_t> twins = core().host_pool.twins().sizes();
  uint64_t host_held_bytes = core().engines.held_bytes() + core().host_pool.kept_bytes() +
                             std::accumulate(twins.begin(), twins.end(), uint64_t{0});
  std::set<std::pair<std::string, int>> arenas;
  std::set<const Backing*> handles;
  std::set<const Backing*> mappings;
  for (size_t index = 0; index < items_.size(); ++index) {
    const Allocation& allocation = find(index);
    EXPECT_EQ(allocation.address(), items_[index].address);
    EXPECT_FALSE(allocation.is_held);
    EXPECT_TRUE(has_every_byte_once(allocation.amounts()));
    arenas.emplace(allocation.tag->name, allocation.device);
    const auto stored = allocation.stored;
    host_held_bytes += stored == nullptr ? 0 : stored->charge.size_bytes();
    for (const Chunk& chunk : allocation.chunks) {
      expect_chunk_sound(items_[index], index, chunk, stored.get());
      const Backing& backing = *chunk.backing;
      if (backing.mapping.is_mapped()) mappings.insert(&backing);
      if (!backing.has_memory() || !handles.insert(&backing).second) continue;
      host_held_bytes += backing.host_charge.size_bytes();
      device_bytes[static_cast<size_t>(allocation.device)] += backing.charge.size_bytes();
    }
  }
  const Live live = Live::now();
  EXPECT_EQ(live.reservations, arenas.size());
  EXPECT_EQ(live.handles, handles.size() + core().host_pool.kept_count() + twins.size());
  EXPECT_EQ(live.mappings, mappings.size());
  EXPECT_EQ(live.device_bytes, device_bytes[0] + device_bytes[1]);
  for (int device = 0; device < kDevices; ++device)
    EXPECT_EQ(core().budgets.device.held_bytes(device), device_bytes[static_cast<size_t>(device)]);
  EXPECT_EQ(core().budgets.host.held_bytes(), host_held_bytes);
}

void OverflowWorld::expect_resident(const std::string& when) {
  for (size_t index = 0; index < items_.size(); ++index)
    EXPECT_EQ(find(index).resident_bytes(), items_[index].size_bytes) << when;
  expect_sound(when);
}

void OverflowWorld::expect_nothing_left() {
  core().engines.trim();
  give_back_caches(core());
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes() + core().host_pool.kept_bytes());
  const Live live = Live::now();
  EXPECT_EQ(live.reservations + live.mappings + live.device_bytes, 0u) << live.text();
  EXPECT_EQ(live.handles, core().host_pool.kept_count());
}

}  // namespace ebbtide::testing
