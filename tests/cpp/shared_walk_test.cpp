// Random walks over all operations on shared handles. Every step checks bytes, budgets and addresses. The walks are the
// same in every run; `make walk` makes more of them.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "base/error.h"
#include "core/operation/pending.h"
#include "core_fixture.h"
#include "sweep.h"

namespace ebbtide::testing {
namespace {

constexpr uint64_t kBetweenWords = 64 * kKiB;

struct Walk {
  uint64_t seed;
  uint64_t shared_handle_bytes;
  bool has_faults;
  friend void PrintTo(const Walk& shown, std::ostream* out) {
    *out << "seed " << shown.seed << ", handles of " << shown.shared_handle_bytes << " bytes"
         << (shown.has_faults ? ", with faults" : "");
  }
};

class SharedWalk : public CoreTest, public ::testing::WithParamInterface<Walk> {
 protected:
  struct Part {
    size_t tag;
    std::vector<uint64_t> content;  // by chunk: the seed of its words; 0 reads as zeros
  };
  struct KnownTag {
    const char* name;
    Policy policy;
    int device;
  };
  const std::vector<KnownTag> tags_ = {
      {"a", {BackupKind::kRam}, 0}, {"b", {BackupKind::kRam, true}, 0}, {"c", {BackupKind::kNone}, 0}};

  uint64_t pick(uint64_t count) { return random_() % count; }
  uint64_t word(uint64_t seed, uint64_t offset) { return seed == 0 ? 0 : seed * 0x9E3779B97F4A7C15ULL + offset; }

  void write(CUdeviceptr address, Part& part) {
    const auto allocation = core().registry.find(address);
    for (const Chunk& chunk : allocation->chunks) {
      if (!chunk.is_resident()) continue;
      part.content[chunk.index] = pick(5) == 0 ? 0 : ++last_seed_;
      for (uint64_t offset = 0; offset < chunk.size_bytes; offset += kBetweenWords) {
        *reinterpret_cast<uint64_t*>(address + chunk.offset + offset) = word(part.content[chunk.index], offset);
      }
    }
  }

  void note_dropped() {
    for (auto& [address, part] : parts_) {
      for (const Chunk& chunk : core().registry.find(address)->chunks) {
        if (chunk.place.load() == Place::kDropped) part.content[chunk.index] = 0;
      }
    }
  }

  void expect_sound() {
    std::set<const Backing*> backings;
    uint64_t device_bytes = 0;
    uint64_t chunks_with_memory = 0;
    for (const auto& [address, part] : parts_) {
      const auto allocation = core().registry.find(address);
      ASSERT_NE(allocation, nullptr);
      ASSERT_EQ(allocation->address(), address);
      for (const Chunk& chunk : allocation->chunks) {
        chunks_with_memory += chunk.backing->has_memory() ? 1 : 0;
        if (chunk.backing->has_memory() && backings.insert(chunk.backing.get()).second)
          device_bytes += chunk.backing->memory.size_bytes();
        if (!chunk.is_resident()) continue;
        for (uint64_t offset = 0; offset < chunk.size_bytes; offset += kBetweenWords) {
          ASSERT_EQ(*reinterpret_cast<const uint64_t*>(address + chunk.offset + offset),
                    word(part.content[chunk.index], offset))
              << "tag " << tags_[part.tag].name << ", chunk " << chunk.index << ", offset " << offset;
        }
      }
    }
    ASSERT_EQ(core().budgets.device.held_bytes(0), device_bytes);
    const Live live = Live::now();
    ASSERT_EQ(live.device_bytes, device_bytes);
    ASSERT_EQ(live.handles, backings.size());
    most_shared_ = std::max(most_shared_, chunks_with_memory - backings.size());
  }

  void run_at(OperationKind kind, size_t tag, std::vector<CUdeviceptr> addresses) {
    if (addresses.empty()) return;
    OperationRequest request;
    request.tags.names = {tags_[tag].name};
    request.tags.addresses = std::move(addresses);
    Operation::claim(core(), kind, std::move(request))->commit();
  }
  std::vector<CUdeviceptr> some_of(size_t tag) {
    std::vector<CUdeviceptr> addresses;
    for (const auto& [address, part] : parts_) {
      if (part.tag == tag && pick(2) == 0) addresses.push_back(address);
    }
    return addresses;
  }
  void swap(size_t leaving, size_t returning) {
    OperationRequest request;
    request.tags.names = {tags_[leaving].name};
    request.resume_tags.names = {tags_[returning].name};
    Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  }
  void resume_in_order(size_t tag) {
    OperationRequest request;
    request.tags.names = {tags_[tag].name};
    for (const CUdeviceptr address : some_of(tag)) request.order.push_back({address + pick(2) * kChunk, kChunk});
    Operation::claim(core(), OperationKind::kResume, std::move(request))->commit();
  }

  // Another thread may free in the middle.
  void resume_in_background(size_t tag) {
    const auto pending = PendingResume::start(claim(OperationKind::kResume, {tags_[tag].name}));
    if (pick(2) == 0) remove();
    pending->wait();
  }

  void add(size_t tag) {
    if (parts_.size() >= 24) return;
    const KnownTag& known = tags_[tag];
    CUdeviceptr address = 0;
    if (pick(3) == 0) {
      address = alloc_chunks(known.name, known.policy, known.device, std::vector<uint64_t>(1 + pick(3), kChunk));
    } else {
      address = allocate(core(), core().registry.tag(known.name), known.policy, known.device, (1 + pick(3)) * kChunk);
    }
    ASSERT_FALSE(parts_.contains(address));
    const auto next = parts_.lower_bound(address);
    const auto allocation = core().registry.find(address);
    EXPECT_TRUE(next == parts_.end() || address + allocation->size_bytes() <= next->first);
    Part& part = parts_[address] = {tag, std::vector<uint64_t>(allocation->chunks.size(), 0)};
    write(address, part);
  }
  void remove() {
    if (parts_.empty()) return;
    const auto found = std::next(parts_.begin(), static_cast<std::ptrdiff_t>(pick(parts_.size())));
    deallocate(core(), found->first);
    parts_.erase(found);
  }

  void step() {
    const size_t tag = pick(tags_.size());
    switch (pick(14)) {
      case 0:
      case 1:
      case 2: return add(tag);
      case 3: return remove();
      case 4:
      case 5: pause({tags_[tag].name}); return;
      case 6: resume({tags_[tag].name}); return;
      case 7: return resume_in_order(tag);
      case 8: return swap(tag, (tag + 1 + pick(tags_.size() - 1)) % tags_.size());
      case 9: return run_at(OperationKind::kTrim, tag, some_of(tag));
      case 10: return run_at(OperationKind::kResume, tag, some_of(tag));
      case 11:
      case 12: return resume_in_background(tag);
      default: return run_at(OperationKind::kPause, tag, some_of(tag));
    }
  }

  std::mt19937_64 random_{GetParam().seed};
  std::map<CUdeviceptr, Part> parts_;
  uint64_t last_seed_ = 0;
  uint64_t most_shared_ = 0;  // how many more chunks there were than handles
};

TEST_P(SharedWalk, EveryStepLeavesBytesAndBooksRight) {
  constexpr int kSteps = 300;
  core().rules.shared_handle_bytes = GetParam().shared_handle_bytes;
  for (const KnownTag& tag : tags_) core().registry.tag(tag.name);
  size_t errors = 0;
  for (int index = 0; index < kSteps; ++index) {
    SCOPED_TRACE("step " + std::to_string(index));
    if (GetParam().has_faults && pick(3) == 0)
      sim().fail(nullptr, 1 + pick(40), pick(2) == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN, pick(3));
    try {
      step();
    } catch (const StateError&) {  // a pause of an allocation that shares a handle
      ++errors;
    } catch (const Error& error) {
      ++errors;
      EXPECT_TRUE(GetParam().has_faults) << error.what();
    }
    sim().clear_failures();
    BackgroundWork::wait_for_all();
    give_back_caches(core());
    note_dropped();
    expect_sound();
    if (HasFatalFailure()) return;
    for (auto& [address, part] : parts_) {
      if (pick(8) == 0) write(address, part);
    }
  }
  if (GetParam().has_faults) {
    EXPECT_GE(errors, 5u);
  }
  EXPECT_GE(most_shared_, 2u);
  resume();
  for (const auto& [address, part] : parts_) run_at(OperationKind::kResume, part.tag, {address});
  note_dropped();
  expect_sound();
  for (const auto& [address, part] : parts_) deallocate(core(), address);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  EXPECT_EQ(Live::now().reservations, 0u);
}

std::vector<Walk> walks() {
  std::vector<Walk> all;
  for (uint64_t seed = 1; seed <= (sweeps_all() ? 40 : 1); ++seed) {
    all.push_back({seed, kGiB, false});
    all.push_back({seed + 100, kGiB, true});
    all.push_back({seed + 200, 4 * kChunk, seed % 2 == 1});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Walks, SharedWalk, ::testing::ValuesIn(walks()),
                         [](const auto& info) { return "seed" + std::to_string(info.param.seed); });

}  // namespace
}  // namespace ebbtide::testing
