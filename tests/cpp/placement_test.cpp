// The placement of a new allocation: sweeps of a pure decision.
#include <gtest/gtest.h>

#include <bit>
#include <numeric>
#include <random>

#include "policy/placement.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kUnit = 2 * kMiB;

// Sizes from one unit to terabytes, small ones often.
struct Draw {
  std::mt19937_64 random{11};
  uint64_t units() { return random() >> (24 + random() % 40); }
  uint64_t bytes() { return random() >> (18 + random() % 46); }
};

TEST(Placement, TheSizesThatSpillsHave) {
  for (const uint64_t size_bytes : {2 * kMiB, 4 * kMiB, 32 * kMiB, 64 * kMiB})
    EXPECT_TRUE(is_cut_for_host(size_bytes, kUnit)) << size_bytes;
  for (const uint64_t size_bytes : {6 * kMiB, 40 * kMiB, 66 * kMiB, 128 * kMiB, kGiB})
    EXPECT_FALSE(is_cut_for_host(size_bytes, kUnit)) << size_bytes;
  EXPECT_TRUE(is_cut_for_host(64 * kMiB, 0)) << "the driver did not tell it";
  for (const uint64_t piece : cut_for_host(302 * kMiB, kUnit)) EXPECT_TRUE(is_cut_for_host(piece, kUnit));
}

TEST(Placement, UsableBytesRespectReserveAndBudget) {
  Draw draw;
  for (int round = 0; round < 2000; ++round) {
    const uint64_t budget = round % 3 == 0 ? kUnlimited : draw.bytes();
    const DeviceRoom room{draw.bytes(), draw.bytes(), budget, draw.bytes(), kUnit};
    for (const uint64_t size : {kSmallAllocationBytes, kSmallAllocationBytes + kUnit, kUnlimited}) {
      const uint64_t reserve = is_small(size) ? room.reserve_bytes / 2 : room.reserve_bytes;
      const uint64_t spared = is_small(size) ? 0 : room.small_bytes;
      const uint64_t usable = usable_bytes(room, size);
      EXPECT_EQ(usable % kUnit, 0u);
      if (usable > 0) {
        EXPECT_LE(usable + spared, room.budget_bytes);
        EXPECT_LE(usable + reserve, room.free_bytes);
      }
      // One unit more would exceed what this allocation may use.
      const uint64_t more = usable + kUnit;
      EXPECT_TRUE(more > saturating_subtract(room.budget_bytes, spared) || more + reserve > room.free_bytes);
      EXPECT_LE(usable, usable_bytes(room, 1)) << "small ones have all that large ones have";
    }
  }
}

TEST(Placement, SmallIsASegmentOfTorchAtMost) {
  EXPECT_TRUE(is_small(1));
  EXPECT_TRUE(is_small(2 * kMiB));
  EXPECT_FALSE(is_small(2 * kMiB + 1));
  EXPECT_FALSE(is_small(20 * kMiB));
}

TEST(Placement, TheRoomForSmallOnesIsLittleAndWhole) {
  EXPECT_EQ(room_for_small(4 * kGiB, 512 * kMiB), 64 * kMiB);
  EXPECT_EQ(room_for_small(kGiB, kUnlimited), 32 * kMiB);
  EXPECT_EQ(room_for_small(127 * kMiB, kUnlimited), 2 * kMiB);
  EXPECT_EQ(room_for_small(63 * kMiB, kUnlimited), 0u) << "a tiny limit has none to give";
  EXPECT_EQ(room_for_small(kUnlimited, kUnlimited), 64 * kMiB);
  EXPECT_EQ(room_for_small(4 * kGiB, 0), 0u) << "who reserves nothing gets all";
  Draw draw;
  for (int round = 0; round < 2000; ++round) {
    const uint64_t limit = draw.bytes(), reserve = draw.bytes();
    const uint64_t bytes = room_for_small(limit, reserve);
    EXPECT_EQ(bytes % kSmallAllocationBytes, 0u);
    EXPECT_LE(bytes, limit / 32);
    EXPECT_LE(bytes, reserve / 2);
    EXPECT_LE(bytes, room_for_small(limit + kGiB, reserve + kGiB));
  }
}

TEST(Placement, TakenMemoryIsNotUsableAgain) {
  DeviceRoom room{100 * kMiB, 20 * kMiB, 90 * kMiB, 10 * kMiB, kUnit};
  room.take(40 * kMiB);
  EXPECT_EQ(usable_bytes(room, kUnlimited), 40 * kMiB);
  EXPECT_EQ(usable_bytes(room, kSmallAllocationBytes), 50 * kMiB);
  room.take(60 * kMiB);
  EXPECT_EQ(usable_bytes(room, kSmallAllocationBytes), 0u);
}

TEST(Placement, SplitUsesTheDeviceFirstAndAllOfIt) {
  Draw draw;
  for (int round = 0; round < 2000; ++round) {
    const uint64_t size = (1 + draw.units()) * kUnit;
    const uint64_t room = draw.units() * kUnit;
    const Placement placed = place_split(size, room);
    EXPECT_EQ(placed.device_bytes + placed.host_bytes, size);
    EXPECT_LE(placed.device_bytes, room);
    EXPECT_TRUE(placed.host_bytes == 0 || placed.device_bytes == room) << "spilled beside free memory";
    EXPECT_GE(place_split(size, room + kUnit).device_bytes, placed.device_bytes);
  }
}

TEST(Placement, WholeNeverSplits) {
  Draw draw;
  for (int round = 0; round < 2000; ++round) {
    const uint64_t size = (1 + draw.units()) * kUnit;
    const uint64_t room = draw.units() * kUnit;
    const Placement placed = place_whole(size, room);
    EXPECT_EQ(placed.device_bytes + placed.host_bytes, size);
    EXPECT_TRUE(placed.device_bytes == 0 || placed.host_bytes == 0);
    EXPECT_EQ(placed.host_bytes == 0, 10 * size <= 6 * room);
  }
}

TEST(Placement, HostChunksHaveFewSizes) {
  Draw draw;
  for (int round = 0; round < 2000; ++round) {
    const uint64_t size = draw.units() % (64 * 1024) * kUnit;
    const std::vector<uint64_t> chunks = cut_for_host(size, kUnit);
    EXPECT_EQ(std::accumulate(chunks.begin(), chunks.end(), uint64_t{0}), size);
    EXPECT_LE(chunks.size(), size / kHostChunkBytes + 5);
    for (size_t index = 0; index < chunks.size(); ++index) {
      EXPECT_TRUE(std::has_single_bit(chunks[index] / kUnit));
      EXPECT_LE(chunks[index], kHostChunkBytes);
      if (index > 0) EXPECT_LE(chunks[index], chunks[index - 1]);
    }
  }
  EXPECT_EQ(cut_for_host(20 * kMiB, kUnit), (std::vector<uint64_t>{16 * kMiB, 4 * kMiB}));
  EXPECT_EQ(cut_for_host(512 * kMiB, 512 * kMiB), (std::vector<uint64_t>{512 * kMiB}));
}

TEST(Placement, SmallDevicesReserveASixteenth) {
  EXPECT_EQ(default_reserve(80 * kGiB), 512 * kMiB);
  EXPECT_EQ(default_reserve(8 * kGiB), 512 * kMiB);
  EXPECT_EQ(default_reserve(kGiB), 64 * kMiB);
}

}  // namespace
}  // namespace ebbtide::policy
