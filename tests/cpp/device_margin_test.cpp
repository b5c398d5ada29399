// device_margin: allocations leave that much of the device's free memory to others.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

constexpr uint64_t kCapacity = 16 * kChunk;

class DeviceMarginTest : public OverflowWorld {
 protected:
  DeviceMarginTest() {
    for (int device = 0; device < kDevices; ++device) sim().set_capacity(device, kCapacity);
  }
  void set_margin(uint64_t bytes) { core().budgets.device_margin.set_bytes(bytes); }
};

TEST_F(DeviceMarginTest, AnAllocationLeavesItFree) {
  set_margin(4 * kChunk);
  const CUdeviceptr address = alloc("w", 12 * kChunk);
  try {
    alloc("w", kChunk);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("device_margin keeps 8 MiB"), std::string::npos) << error.what();
    EXPECT_EQ(error.shortage.requested_bytes, kChunk);
    EXPECT_EQ(error.shortage.free_bytes, 0u);
    EXPECT_EQ(error.device, 0);
  }
  EXPECT_EQ(core().budgets.device.held_bytes(0), 12 * kChunk);
  alloc("w", kChunk, BackupKind::kRam, 1);  // each device has its own
  set_margin(3 * kChunk);
  deallocate(core(), alloc("w", kChunk));
  set_margin(4 * kChunk);
  deallocate(core(), address);
  deallocate(core(), alloc("w", 12 * kChunk));
}

TEST_F(DeviceMarginTest, OthersTakeFromIt) {
  set_margin(4 * kChunk);
  sim().set_foreign_bytes(0, 10 * kChunk);
  EXPECT_THROW(alloc("w", 3 * kChunk), OutOfMemory);
  deallocate(core(), alloc("w", 2 * kChunk));
  sim().set_foreign_bytes(0, 15 * kChunk);  // less than the margin is left
  EXPECT_THROW(alloc("w", kChunk), OutOfMemory);
  set_margin(0);
  EXPECT_THROW(alloc("w", 2 * kChunk), OutOfMemory);
  deallocate(core(), alloc("w", kChunk));
  EXPECT_EQ(core().budgets.device.peak_bytes(0), 2 * kChunk) << "a refused request is no peak";
  sim().set_foreign_bytes(0, 0);
}

TEST_F(DeviceMarginTest, WithoutAMarginTheDeviceIsNotAsked) {
  if (is_hip()) GTEST_SKIP() << "it is asked there before each release";
  sim().clear_log();
  deallocate(core(), alloc("w", kChunk));
  EXPECT_EQ(sim().calls("cuMemGetInfo"), 0u);
}

TEST_F(DeviceMarginTest, WhatComesBackMayUseIt) {
  const CUdeviceptr address = alloc("w", 12 * kChunk);
  fill(address, 12 * kChunk, 1);
  pause();
  set_margin(8 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, 12 * kChunk, 1));
}

TEST_F(DeviceMarginTest, WhatMaySpillSpills) {
  set_margin(4 * kChunk);
  const CUdeviceptr address = alloc_with("o", kSplitRam, 14 * kChunk);
  const auto allocation = core().registry.find(address);
  EXPECT_EQ(allocation->device_bytes(), 12 * kChunk);
  EXPECT_EQ(allocation->host_bytes(), 2 * kChunk);
  EXPECT_EQ(promote().totals().bytes, 0u) << "nor does a promotion use it";
  set_margin(2 * kChunk);
  EXPECT_EQ(promote().totals().bytes, 2 * kChunk);
}

TEST_F(DeviceMarginTest, MemoryThatEbbtideStillKeepsGoesBackFirst) {
  set_margin(4 * kChunk);
  const CUdeviceptr address = alloc("w", 12 * kChunk);
  sim().fail("cuMemRelease", 1, 999, 1);
  deallocate(core(), address);
  sim().clear_failures();
  deallocate(core(), alloc("w", 12 * kChunk));
}

TEST_F(DeviceMarginTest, Invariant7_TwoThreadsDoNotPassOneLook) {
  set_margin(4 * kChunk);
  sim().set_delay("cuMemCreate", 2000);
  for (int round = 0; round < 5; ++round) {
    std::atomic<int> successes{0};
    std::vector<CUdeviceptr> made(4, 0);
    {
      std::vector<std::jthread> threads;
      for (size_t index = 0; index < made.size(); ++index) {
        threads.emplace_back([&, index] {
          try {
            made[index] = alloc("w", 5 * kChunk);
            ++successes;
          } catch (const OutOfMemory&) {
            // Two of them fit.
          }
        });
      }
    }
    EXPECT_EQ(successes, 2);
    for (const CUdeviceptr address : made) {
      if (address != 0) deallocate(core(), address);
    }
  }
  sim().set_delay("cuMemCreate", 0);
}

// Every driver call of an allocation fails once, also the look at the device.
TEST_F(DeviceMarginTest, Invariant3_AnAllocationThatFailsLeavesNothing) {
  set_margin(4 * kChunk);
  deallocate(core(), alloc("other", kChunk));
  const Live before = Live::now();
  sim().clear_log();
  deallocate(core(), alloc("w", 3 * kChunk));
  const uint64_t calls = sim().calls(nullptr);
  EXPECT_GT(sim().calls("cuMemGetInfo"), 0u);
  for (uint64_t k = 1; k <= calls; ++k) {
    SCOPED_TRACE(k);
    sim().fail(nullptr, k, 999, 1);
    CUdeviceptr address = 0;
    try {
      address = alloc("w", 3 * kChunk);
    } catch (const DriverError&) {
      // As the call says.
    }
    sim().clear_failures();
    give_back_caches(core());
    if (address != 0) deallocate(core(), address);
    give_back_caches(core());
    EXPECT_EQ(Live::now(), before);
    EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  }
}

}  // namespace
}  // namespace ebbtide::testing
