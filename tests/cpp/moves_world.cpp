#include "moves_world.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

constexpr uint64_t kFirstSeed = 256;

// The bytes of a block that was written with this content. Blocks of different seeds differ in every page.
const std::byte* bytes_of(uint64_t content) {
  static std::map<uint64_t, std::vector<std::byte>> constant;
  static const std::vector<std::byte> noise = random_bytes(2 * kChunk, 1);
  if (content >= kFirstSeed) return noise.data() + 8 * (content - kFirstSeed);
  return constant.try_emplace(content, kChunk, static_cast<std::byte>(content)).first->second.data();
}

::testing::AssertionResult is_block(const std::byte* bytes, uint64_t content) {
  const std::byte* const wanted = bytes_of(content);
  if (std::memcmp(bytes, wanted, kChunk) == 0) return ::testing::AssertionSuccess();
  size_t at = 0;
  while (bytes[at] == wanted[at]) ++at;
  return ::testing::AssertionFailure() << "byte " << at << " of a block is not what content " << content << " wrote";
}

// The bytes that would come back for a block that is away, until the next call.
const std::byte* stored_block(const BackupRecord& stored, size_t block) {
  static const AlignedBytes bytes(kChunk);
  if (stored.blocks[block].is_constant) {
    kernels::fill_block(bytes.get(), stored.blocks[block].value);
  } else {
    stored.backup->read(block * kChunk, bytes.get(), kChunk);
  }
  return bytes.get();
}

}  // namespace

size_t count_calls(const std::function<void()>& act) {
  sim().clear_log();
  act();
  return sim().calls(nullptr);
}

void MovesWorld::free_all() {
  for (const Item& item : items_) deallocate(core(), item.address);
  items_.clear();
}

void MovesWorld::expect_nothing_left() {
  core().engines.trim();
  give_back_caches(core());
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  for (int device = 0; device < kDevices; ++device) EXPECT_EQ(core().budgets.device.held_bytes(device), 0u);
  // A ring or a pinned backup still counts if the driver did not confirm that a copy has ended, because the copy may
  // still use it.
  const uint64_t lost_bytes = core().budgets.pinned.lost_bytes();
  EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes() + lost_bytes);
  EXPECT_EQ(core().budgets.pinned.held_bytes(), core().engines.held_bytes() + lost_bytes);
  const Live live = Live::now();
  EXPECT_EQ(live.reservations + live.handles + live.mappings + live.device_bytes, 0u) << live.text();
  EXPECT_TRUE(live.registered_ranges == 0 || core().engines.held_bytes() + lost_bytes > 0) << live.text();
}

void MovesWorld::build(const std::vector<ItemSpec>& specs) {
  free_all();
  uint64_t seed = kFirstSeed;
  for (const ItemSpec& spec : specs) {
    std::vector<uint64_t> chunk_bytes;
    size_t blocks = 0;
    for (const uint64_t count : spec.chunk_blocks) {
      chunk_bytes.push_back(count * kChunk);
      blocks += count;
    }
    Item& item = items_.emplace_back(Item{spec, 0, std::vector<uint64_t>(blocks, 0), std::vector<bool>(blocks, false)});
    item.address = alloc_chunks(spec.tag, spec.policy, spec.device, chunk_bytes);
    for (size_t block = 0; block < blocks; ++block) write_block(items_.size() - 1, block, seed++);
  }
}

void MovesWorld::write_block(size_t item, size_t block, uint64_t content) {
  items_[item].content[block] = content;
  std::memcpy(reinterpret_cast<void*>(items_[item].address + block * kChunk), bytes_of(content), kChunk);
}

void MovesWorld::note_dropped() {
  for (Item& item : items_) {
    const auto allocation = core().registry.find(item.address);
    const auto stored = allocation->stored;
    for (const Chunk& chunk : allocation->chunks) {
      for (size_t block = chunk.first_block(); block < chunk.first_block() + chunk.block_count(); ++block) {
        const Place place = chunk.place.load();
        const bool is_left_behind = item.is_unused[block] && place == Place::kStored &&
                                    stored->blocks[block].is_constant &&
                                    stored->blocks[block].value == core().rules.dropped_value();
        if (is_left_behind || place == Place::kDropped)
          item.content[block] = core().rules.must_poison ? kPoisonByte : 0;
      }
    }
  }
}

void MovesWorld::expect_item_sound(Item& item) {
  const auto allocation = core().registry.find(item.address);
  ASSERT_NE(allocation, nullptr);
  EXPECT_EQ(allocation->address(), item.address);
  EXPECT_FALSE(allocation->is_held);
  EXPECT_TRUE(has_every_byte_once(allocation->amounts()));
  const auto stored = allocation->stored;
  for (const Chunk& chunk : allocation->chunks) {
    SCOPED_TRACE(item.spec.tag + ", chunk " + std::to_string(chunk.index));
    const Place place = chunk.place.load();
    const bool is_detached = chunk.is_detached.load();
    EXPECT_EQ(chunk.backing->has_memory(), chunk.is_resident() || chunk.has_stale_memory() || is_detached);
    EXPECT_FALSE(is_detached && chunk.backing->mapping.is_mapped());
    EXPECT_EQ(chunk.backing->charge.size_bytes(), chunk.backing->memory.size_bytes());
    for (size_t block = chunk.first_block(); block < chunk.first_block() + chunk.block_count(); ++block) {
      if (place == Place::kDevice && !is_detached) {
        ASSERT_TRUE(chunk.backing->mapping.is_mapped());
        EXPECT_TRUE(is_block(reinterpret_cast<const std::byte*>(item.address + block * kChunk), item.content[block]));
      }
      if (place == Place::kStored) {
        ASSERT_NE(stored, nullptr);
        EXPECT_TRUE(is_block(stored_block(*stored, block), item.content[block]));
      }
    }
  }
}

void MovesWorld::expect_budgets_match() {
  std::vector<uint64_t> device_bytes(kDevices, 0);
  uint64_t backup_bytes = 0;
  uint64_t pinned_bytes = 0;
  Live wanted{};
  std::set<std::pair<std::string, int>> arenas;
  std::set<const Backing*> handles;
  std::set<const Backing*> mappings;
  for (const Item& item : items_) {
    arenas.emplace(item.spec.tag, item.spec.device);
    const auto allocation = core().registry.find(item.address);
    for (const Chunk& chunk : allocation->chunks) {
      if (chunk.backing->has_memory()) handles.insert(chunk.backing.get());
      if (chunk.backing->mapping.is_mapped()) mappings.insert(chunk.backing.get());
      device_bytes[static_cast<size_t>(item.spec.device)] += chunk.backing->has_memory() ? chunk.size_bytes : 0;
    }
    const auto stored = allocation->stored;
    if (stored == nullptr) continue;
    backup_bytes += stored->charge.size_bytes();
    uint64_t touched_bytes = 0;
    for (const StoredBlock& block : stored->blocks) touched_bytes += block.is_touched ? kChunk : 0;
    EXPECT_EQ(stored->charge.size_bytes(), stored->kind == BackupKind::kDisk ? 0 : touched_bytes);
    if (!stored->is_pinned()) continue;
    pinned_bytes += stored->size_bytes();
    ++wanted.registered_ranges;
  }
  const Live live = Live::now();
  EXPECT_EQ(live.handles, handles.size());
  EXPECT_EQ(live.mappings, mappings.size());
  EXPECT_GE(live.registered_ranges, wanted.registered_ranges);  // and the rings
  EXPECT_EQ(live.reservations, arenas.size());
  EXPECT_EQ(live.device_bytes, device_bytes[0] + device_bytes[1]);
  for (int device = 0; device < kDevices; ++device)
    EXPECT_EQ(core().budgets.device.held_bytes(device), device_bytes[static_cast<size_t>(device)]);
  const uint64_t other_bytes = core().engines.held_bytes() + core().budgets.pinned.lost_bytes();
  EXPECT_EQ(core().budgets.host.held_bytes(), other_bytes + backup_bytes);
  EXPECT_EQ(core().budgets.pinned.held_bytes(), other_bytes + pinned_bytes);
}

void MovesWorld::expect_sound(const std::string& when) {
  SCOPED_TRACE(when);
  note_dropped();
  for (Item& item : items_) expect_item_sound(item);
  if (HasFailure()) return;
  expect_budgets_match();
  core().registry.visit_tags([&](const Tag& tag) {
    EXPECT_FALSE(tag.is_busy) << tag.name;
    if (!tag.is_partial) return;
    bool is_any_away = false;
    bool is_any_here = false;
    for (const auto& [sequence, allocation] : tag.allocations) {
      is_any_away |= allocation->is_away();
      is_any_here |= allocation->device_bytes() > 0 || allocation->has_stale_memory();
    }
    EXPECT_TRUE(is_any_away && is_any_here) << tag.name << " is called partial, and is not";
  });
}

void MovesWorld::expect_bytes(const std::string& when) {
  for (const Place place : places()) EXPECT_EQ(place, Place::kDevice) << when;
  EXPECT_FALSE(is_any_detached()) << when;
  expect_sound(when);
}

std::vector<Place> MovesWorld::places() const {
  std::vector<Place> found;
  for (const Item& item : items_) {
    for (const Chunk& chunk : const_cast<MovesWorld*>(this)->core().registry.find(item.address)->chunks)
      found.push_back(chunk.place.load());
  }
  return found;
}

bool MovesWorld::is_any_detached() {
  return std::any_of(items_.begin(), items_.end(), [&](const Item& item) {
    const auto allocation = core().registry.find(item.address);
    return std::any_of(allocation->chunks.begin(), allocation->chunks.end(),
                       [](const Chunk& chunk) { return chunk.is_detached.load(); });
  });
}

void MovesWorld::pause_but_unused() {
  OperationRequest request;
  std::vector<AddressRange> unused;
  for (const Item& item : items_) {
    for (size_t block = 0; block < item.is_unused.size(); ++block) {
      if (item.is_unused[block]) unused.push_back({item.address + block * kChunk, kChunk});
    }
  }
  request.unused = AddressRanges(std::move(unused));
  request.unused_as_of = core().registry.leases.newest();
  Operation::claim(core(), OperationKind::kPause, std::move(request))->commit();
}

std::vector<Report> MovesWorld::swap(const std::vector<std::string>& leaving,
                                     const std::vector<std::string>& returning) {
  OperationRequest request;
  request.tags.names = leaving;
  request.resume_tags.names = returning;
  return Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
}

void MovesWorld::run_at(OperationKind kind, const std::vector<std::string>& tags,
                        const std::vector<CUdeviceptr>& addresses) {
  OperationRequest request;
  request.tags.names = tags;
  request.tags.addresses = addresses;
  Operation::claim(core(), kind, std::move(request))->commit();
}

}  // namespace ebbtide::testing
