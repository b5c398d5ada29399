#include "fault_world.h"

#include "sweep.h"

#include <sstream>

#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

uint64_t seed_of(size_t block, size_t chunk) { return 1000 * (block + 1) + chunk; }

}  // namespace

void FaultTest::build(const std::vector<BlockSpec>& specs) {
  restart();
  blocks_.clear();
  for (const BlockSpec& spec : specs) {
    Block& block = blocks_.emplace_back();
    block.spec = spec;
    block.address = alloc_chunks(spec.tag, spec.backup, spec.device, spec.chunk_bytes);
    block.is_blank.assign(spec.chunk_bytes.size(), false);
    CUdeviceptr at = block.address;
    for (size_t chunk = 0; chunk < spec.chunk_bytes.size(); ++chunk) {
      fill(at, spec.chunk_bytes[chunk], seed_of(blocks_.size() - 1, chunk));
      at += spec.chunk_bytes[chunk];
    }
  }
}

void FaultTest::expect_sound(const std::string& when) {
  SCOPED_TRACE(when);
  note_dropped();
  std::vector<uint64_t> device_bytes(kDevices, 0);
  std::set<std::pair<std::string, int>> arenas;
  std::set<const Backing*> handles;
  std::set<const Backing*> mappings;
  std::map<std::string, std::pair<bool, bool>> away_and_here;
  for (size_t index = 0; index < blocks_.size(); ++index) {
    Block& block = blocks_[index];
    const auto allocation = core().registry.find(block.address);
    ASSERT_NE(allocation, nullptr);
    EXPECT_EQ(allocation->address(), block.address);
    EXPECT_FALSE(allocation->is_held);
    arenas.emplace(block.spec.tag, block.spec.device);
    const auto stored = allocation->stored;
    for (const Chunk& chunk : allocation->chunks) {
      SCOPED_TRACE("block " + std::to_string(index) + ", chunk " + std::to_string(chunk.index));
      const CUdeviceptr address = block.address + chunk.offset;
      const uint64_t seed = seed_of(index, chunk.index);
      auto& [is_away, is_here] = away_and_here[block.spec.tag];
      is_away |= !chunk.is_resident();
      is_here |= chunk.is_resident() || chunk.has_stale_memory();
      if (chunk.is_resident() || !chunk.has_stale_memory()) {
        EXPECT_EQ(chunk.backing->mapping.is_mapped(), chunk.is_resident());
      }
      EXPECT_EQ(chunk.backing->has_memory(), chunk.is_resident() || chunk.has_stale_memory());
      if (chunk.backing->has_memory()) {
        device_bytes[static_cast<size_t>(block.spec.device)] += chunk.size_bytes;
        handles.insert(chunk.backing.get());
      }
      if (chunk.backing->mapping.is_mapped()) mappings.insert(chunk.backing.get());
      switch (chunk.place.load()) {
        case Place::kDevice:
          EXPECT_TRUE(block.is_blank[chunk.index] ? is_zero(address, chunk.size_bytes)
                                                  : holds(address, chunk.size_bytes, seed));
          break;
        case Place::kStored:
          ASSERT_NE(stored, nullptr);
          EXPECT_TRUE(
              holds(reinterpret_cast<CUdeviceptr>(stored->backup->view() + chunk.offset), chunk.size_bytes, seed));
          break;
        default: break;
      }
    }
  }
  const Live live = Live::now();
  EXPECT_EQ(live.reservations, arenas.size());
  EXPECT_EQ(live.handles, handles.size());
  EXPECT_EQ(live.mappings, mappings.size());
  EXPECT_EQ(live.device_bytes, device_bytes[0] + device_bytes[1]);
  for (int device = 0; device < kDevices; ++device)
    EXPECT_EQ(core().budgets.device.held_bytes(device), device_bytes[static_cast<size_t>(device)]);
  core().registry.visit_tags([&](const Tag& tag) {
    EXPECT_FALSE(tag.is_busy);
    const auto [is_away, is_here] = away_and_here[tag.name];
    // A tag without memory away is resident, and a tag without memory here is paused, whatever failed.
    if (!is_away || !is_here) {
      EXPECT_FALSE(tag.is_partial) << tag.name;
    }
  });
}

void FaultTest::note_dropped() {
  for (Block& block : blocks_) {
    for (const Chunk& chunk : core().registry.find(block.address)->chunks) {
      if (chunk.place.load() == Place::kDropped) block.is_blank[chunk.index] = true;
    }
  }
}

std::vector<Place> FaultTest::places() {
  std::vector<Place> found;
  for (const Block& block : blocks_) {
    for (const Chunk& chunk : core().registry.find(block.address)->chunks) {
      found.push_back(chunk.place.load());
    }
  }
  return found;
}

void FaultTest::refill_blank() {
  for (size_t index = 0; index < blocks_.size(); ++index) {
    Block& block = blocks_[index];
    for (const Chunk& chunk : core().registry.find(block.address)->chunks) {
      if (block.is_blank[chunk.index])
        fill(block.address + chunk.offset, chunk.size_bytes, seed_of(index, chunk.index));
      block.is_blank[chunk.index] = false;
    }
  }
}

std::vector<std::string> FaultTest::calls_of(const std::function<void()>& act) {
  sim().clear_log();
  act();
  return logged_calls();
}

Live FaultTest::without_lost(Live live) {
  live.streams = live.events = live.queued_items = live.pinned_blocks = live.pinned_bytes = 0;
  live.registered_ranges = 0;
  return live;
}

}  // namespace ebbtide::testing
