// Pools of CPU memory on a fake segment source: sizes as torch's CUDA allocator cuts them, best fit, splitting and
// coalescing, out of memory, frees from any thread.
#include "torch/cpu/pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "torch/cpu/routing.h"

namespace ebbtide::cpu {
namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * 1024;

class FakeSource final : public SegmentSource {
 public:
  ~FakeSource() override {
    for (const auto& [address, size] : live) std::free(address);
  }
  void* acquire(int32_t slot, size_t size_bytes) noexcept override {
    std::lock_guard<std::mutex> guard(mutex);
    if (held_bytes + size_bytes > capacity_bytes) return nullptr;
    held_bytes += size_bytes;
    slots.push_back(slot);
    sizes.push_back(size_bytes);
    // Only an address: neither the tests nor the arena may touch the bytes.
    void* address = std::aligned_alloc(kMinBlockBytes, size_bytes);
    live[address] = size_bytes;
    return address;
  }
  void release(void* address) noexcept override {
    std::lock_guard<std::mutex> guard(mutex);
    held_bytes -= live.at(address);
    live.erase(address);
    std::free(address);
  }

  std::mutex mutex;
  size_t capacity_bytes = size_t{1} << 40, held_bytes = 0;
  std::vector<int32_t> slots;
  std::vector<size_t> sizes;
  std::map<void*, size_t> live;
};

class PoolTest : public ::testing::Test {
 protected:
  // Blocks tile each segment, no two free blocks are neighbours, and the free lists contain exactly the free blocks.
  void expect_whole(Pool& pool) {
    size_t free_blocks = 0;
    for (const SegmentView& segment : arena.snapshot(pool)) {
      size_t next_offset = 0;
      bool was_free = false;
      for (const BlockView& block : segment.blocks) {
        EXPECT_EQ(block.offset_bytes, next_offset);
        EXPECT_EQ(block.size_bytes % kMinBlockBytes, 0u);
        EXPECT_GT(block.size_bytes, 0u);
        EXPECT_FALSE(was_free && !block.is_allocated) << "free neighbours";
        next_offset += block.size_bytes;
        was_free = !block.is_allocated;
        free_blocks += was_free ? 1 : 0;
      }
      EXPECT_EQ(next_offset, segment.size_bytes);
    }
    EXPECT_EQ(pool.small_free.size() + pool.large_free.size(), free_blocks);
  }

  FakeSource source;
  Arena arena{source};
  Pool& pool = arena.make_pool(7, "weights");
};

TEST_F(PoolTest, CutsSegmentsAsTorchDoes) {
  const std::map<size_t, size_t> expected = {
      {1, 2 * kMiB},
      {512 * kKiB, 2 * kMiB},
      {kMiB, 2 * kMiB},
      {kMiB + 1, 20 * kMiB},
      {10 * kMiB - 512, 20 * kMiB},
      {10 * kMiB, 10 * kMiB},
      {10 * kMiB + 1, 12 * kMiB},
      {21 * kMiB, 22 * kMiB},
      {100 * kMiB + 1, 102 * kMiB},
  };
  for (const auto& [request, segment] : expected) EXPECT_EQ(segment_size(round_request(request)), segment) << request;
  EXPECT_EQ(round_request(0), 512u);
  EXPECT_EQ(round_request(512), 512u);
  EXPECT_EQ(round_request(513), 1024u);
}

TEST_F(PoolTest, SmallRequestsShareASegmentOfTheirSlot) {
  std::vector<void*> blocks;
  for (int i = 0; i < 4096; ++i) blocks.push_back(arena.allocate(pool, 100));
  EXPECT_EQ(source.sizes, std::vector<size_t>{2 * kMiB});
  EXPECT_EQ(source.slots, std::vector<int32_t>{7});
  std::sort(blocks.begin(), blocks.end());
  for (size_t i = 1; i < blocks.size(); ++i)
    EXPECT_EQ(static_cast<char*>(blocks[i]) - static_cast<char*>(blocks[i - 1]), 512);
  EXPECT_NE(arena.allocate(pool, 100), nullptr);
  EXPECT_EQ(source.sizes.size(), 2u);
  expect_whole(pool);
}

TEST_F(PoolTest, SmallAndLargeRequestsNeverShareASegment) {
  void* large = arena.allocate(pool, 2 * kMiB);
  arena.deallocate(large);
  arena.allocate(pool, 4 * kKiB);
  EXPECT_EQ(source.sizes, (std::vector<size_t>{20 * kMiB, 2 * kMiB}));
  expect_whole(pool);
}

TEST_F(PoolTest, ServesTheSmallestFreeBlockThatFits) {
  void* big = arena.allocate(pool, 64 * kKiB);
  arena.allocate(pool, 512);
  void* fitting = arena.allocate(pool, 8 * kKiB);
  arena.allocate(pool, 512);
  arena.deallocate(big);
  arena.deallocate(fitting);
  EXPECT_EQ(arena.allocate(pool, 8 * kKiB), fitting);
  EXPECT_EQ(arena.allocate(pool, 8 * kKiB), big);
  expect_whole(pool);
}

TEST_F(PoolTest, KeepsALargeRestOfUpToOneMebibyteWithItsBlock) {
  void* whole = arena.allocate(pool, 12 * kMiB);
  arena.deallocate(whole);
  EXPECT_EQ(arena.allocate(pool, 11 * kMiB), whole);
  EXPECT_EQ(arena.snapshot(pool)[0].blocks.size(), 1u);
  arena.deallocate(whole);
  EXPECT_EQ(arena.allocate(pool, 10 * kMiB), whole);
  EXPECT_EQ(arena.snapshot(pool)[0].blocks.size(), 2u);
  expect_whole(pool);
}

TEST_F(PoolTest, FreeNeighboursBecomeOneWhateverTheOrder) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    std::vector<void*> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(arena.allocate(pool, 100 * kKiB));
    for (int i : order) {
      EXPECT_TRUE(arena.deallocate(blocks[static_cast<size_t>(i)]));
      expect_whole(pool);
    }
    ASSERT_EQ(arena.snapshot(pool).size(), 1u);
    ASSERT_EQ(arena.snapshot(pool)[0].blocks.size(), 1u);
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(source.sizes.size(), 1u);
}

TEST_F(PoolTest, AFreedBlockIsServedByItsOwnPoolOnly) {
  Pool& other = arena.make_pool(8, "");
  void* block = arena.allocate(pool, kKiB);
  arena.deallocate(block);
  EXPECT_NE(arena.allocate(other, kKiB), block);
  EXPECT_EQ(source.slots, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(arena.allocate(pool, kKiB), block);
}

TEST_F(PoolTest, ForeignAndRepeatedFreesChangeNothing) {
  int local = 0;
  EXPECT_FALSE(arena.deallocate(&local));
  EXPECT_FALSE(arena.deallocate(nullptr));
  EXPECT_FALSE(arena.owns(&local));
  auto* block = static_cast<char*>(arena.allocate(pool, kKiB));
  EXPECT_TRUE(arena.owns(block + 17));
  EXPECT_TRUE(arena.deallocate(block + 512));
  EXPECT_TRUE(arena.deallocate(block));
  EXPECT_TRUE(arena.deallocate(block));
  expect_whole(pool);
}

TEST_F(PoolTest, OutOfMemoryGivesFreeSegmentsBackFirst) {
  source.capacity_bytes = 24 * kMiB;
  void* first = arena.allocate(pool, 12 * kMiB);
  void* small = arena.allocate(pool, kKiB);
  EXPECT_EQ(arena.allocate(pool, 16 * kMiB), nullptr);
  arena.deallocate(first);
  EXPECT_NE(arena.allocate(pool, 16 * kMiB), nullptr);
  EXPECT_EQ(source.held_bytes, 18 * kMiB);
  EXPECT_TRUE(arena.owns(small)) << "a segment with a living block stays";
  expect_whole(pool);
}

TEST_F(PoolTest, OutOfMemoryGivesOtherPoolsFreeSegmentsBackToo) {
  Pool& other = arena.make_pool(8, "");
  source.capacity_bytes = 20 * kMiB;
  arena.deallocate(arena.allocate(other, 2 * kMiB));
  EXPECT_NE(arena.allocate(pool, 16 * kMiB), nullptr);
  EXPECT_TRUE(arena.snapshot(other).empty());
  expect_whole(other);
}

TEST_F(PoolTest, AbsurdRequestsAreOutOfMemory) {
  EXPECT_EQ(arena.allocate(pool, SIZE_MAX), nullptr);
  EXPECT_EQ(arena.allocate(pool, SIZE_MAX - 511), nullptr);
  EXPECT_EQ(arena.allocate(pool, kMaxRequestBytes + 1), nullptr);
  EXPECT_TRUE(source.sizes.empty());
}

TEST_F(PoolTest, TrimGivesBackWhollyFreeSegments) {
  void* kept = arena.allocate(pool, kKiB);
  void* gone = arena.allocate(pool, 30 * kMiB);
  arena.deallocate(gone);
  EXPECT_EQ(arena.trim(&pool), 30 * kMiB);
  EXPECT_EQ(arena.trim(&pool), 0u);
  arena.deallocate(kept);
  EXPECT_EQ(arena.trim(nullptr), 2 * kMiB);
  EXPECT_EQ(source.held_bytes, 0u);
}

TEST_F(PoolTest, AQuestionAboutAPoolCostsTheSameWithAnyNumberOfOthers) {
  Pool& pool = arena.make_pool(1, "");
  arena.allocate(pool, 20 * kMiB);
  arena.deallocate(arena.allocate(pool, 30 * kMiB));
  for (int number = 2; number < 100; ++number) arena.allocate(arena.make_pool(number, ""), kMiB);
  const uint64_t before = arena.look_count();
  EXPECT_EQ(arena.snapshot(pool).size(), 2u);
  EXPECT_EQ(arena.look_count() - before, 2u);
  EXPECT_EQ(arena.trim(&pool), 30 * kMiB);
  EXPECT_EQ(arena.look_count() - before, 4u);
  EXPECT_EQ(arena.snapshot(pool).size(), 1u);
  EXPECT_EQ(arena.trim(nullptr), 0u);
  EXPECT_EQ(arena.look_count() - before, 4u + 1u + 99u);
}

TEST_F(PoolTest, APoolIsOpenInOnePlaceAtATime) {
  EXPECT_EQ(arena.find_pool(pool.id), &pool);
  EXPECT_EQ(arena.find_pool(0), nullptr);
  EXPECT_EQ(arena.find_pool(2), nullptr);
  EXPECT_EQ(arena.find_pool(-1), nullptr);
  EXPECT_TRUE(arena.open(pool));
  EXPECT_FALSE(arena.open(pool));
  EXPECT_TRUE(arena.close(pool));
  EXPECT_FALSE(arena.close(pool));
}

TEST_F(PoolTest, RandomWorkKeepsEveryBlockApart) {
  std::mt19937 random(20240511);
  std::map<char*, size_t> live;
  for (int step = 0; step < 20000; ++step) {
    if (live.size() < 200 && random() % 5 != 0) {
      const size_t request = 1 + random() % (size_t{1} << (9 + random() % 16));
      auto* address = static_cast<char*>(arena.allocate(pool, request));
      ASSERT_NE(address, nullptr);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(address) % 64, 0u);
      const auto after = live.lower_bound(address);
      ASSERT_TRUE(after == live.end() || address + request <= after->first);
      ASSERT_TRUE(after == live.begin() || std::prev(after)->first + std::prev(after)->second <= address);
      live[address] = request;
    } else if (!live.empty()) {
      const auto chosen = std::next(live.begin(), static_cast<long>(random() % live.size()));
      ASSERT_TRUE(arena.deallocate(chosen->first));
      live.erase(chosen);
    }
    if (step % 1000 == 0) expect_whole(pool);
  }
  for (const auto& [address, size] : live) arena.deallocate(address);
  expect_whole(pool);
  arena.trim(&pool);
  EXPECT_EQ(source.held_bytes, 0u);
}

TEST_F(PoolTest, Invariant6FreesComeFromAnyThread) {
  constexpr int kThreads = 8;
  std::vector<std::atomic<void*>> exchange(kThreads * 4);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      for (int step = 0; step < 2000; ++step) {
        void* made = arena.allocate(pool, 1 + random() % (64 * kKiB));
        void* other = exchange[random() % exchange.size()].exchange(made);
        if (made == nullptr || (other != nullptr && !arena.deallocate(other))) ++failures;
        if (step % 500 == 0) arena.trim(nullptr);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& left : exchange) {
    if (void* address = left.load()) arena.deallocate(address);
  }
  EXPECT_EQ(failures, 0);
  expect_whole(pool);
  arena.trim(nullptr);
  EXPECT_EQ(source.held_bytes, 0u);
}

TEST_F(PoolTest, TheInnermostPoolOfTheThreadWins) {
  Routing routing;
  Pool& inner = arena.make_pool(1, "");
  Pool& for_all = arena.make_pool(2, "");
  EXPECT_EQ(routing.current(), nullptr);
  routing.enter(&for_all, true);
  EXPECT_EQ(routing.current(), &for_all);
  routing.enter(&pool);
  routing.enter(&inner);
  EXPECT_EQ(routing.current(), &inner);
  std::thread([&] { EXPECT_EQ(routing.current(), &for_all); }).join();
  const uint64_t token = routing.enter(nullptr);
  EXPECT_EQ(routing.current(), nullptr) << "suspended: ordinary memory, also beside a pool for all threads";
  EXPECT_FALSE(routing.restore(token + 1));
  EXPECT_TRUE(routing.restore(token));
  EXPECT_FALSE(routing.restore(token));
  EXPECT_TRUE(routing.leave(&pool)) << "not in order: the outer one goes, the inner one stays";
  EXPECT_EQ(routing.current(), &inner);
  EXPECT_FALSE(routing.leave(&pool));
  EXPECT_TRUE(routing.leave(&inner));
  EXPECT_EQ(routing.current(), &for_all);
  EXPECT_TRUE(routing.leave(&for_all, true));
  EXPECT_FALSE(routing.leave(&for_all, true));
  EXPECT_EQ(routing.current(), nullptr);
}

}  // namespace
}  // namespace ebbtide::cpu
