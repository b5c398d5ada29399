// Spills, frees and operations of several threads at the same time.
#include <thread>

#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr int kRounds = 15;
#else
constexpr int kRounds = 30;
#endif

using OverflowThreads = OverflowWorld;

TEST_F(OverflowThreads, Invariant7_ThreadsThatSpillShareBudgetAndPool) {
  core().host_pool.set_capacity(3 * kChunk);
  core().budgets.host.set_limit(64 * kChunk);
  core().budgets.device.set_limit(6 * kChunk);
  std::atomic<int> spilled{0};
  {
    std::vector<std::jthread> threads;
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      threads.emplace_back([&, seed] {
        for (int round = 0; round < kRounds; ++round) {
          const uint64_t size_bytes = (1 + (seed + static_cast<uint64_t>(round)) % 5) * kChunk;
          const CUdeviceptr address = alloc_with("t" + std::to_string(seed), kSplitNone, size_bytes);
          EXPECT_TRUE(is_zero(address, size_bytes)) << "Invariant 2";
          fill(address, size_bytes, seed);
          spilled += core().registry.find(address)->host_bytes() > 0 ? 1 : 0;
          EXPECT_LE(core().budgets.device.held_bytes(0), 6 * kChunk);
          EXPECT_TRUE(holds(address, size_bytes, seed));
          deallocate(core(), address);
        }
      });
    }
  }
  EXPECT_GT(spilled, 0);
  EXPECT_LE(core().host_pool.kept_bytes(), 3 * kChunk);
  expect_nothing_left();
}

TEST_F(OverflowThreads, Invariant12_SpillsGoOnBesideOperations) {
  spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
  spill("w", kSplitRam, 0, 2 * kChunk);
  core().host_pool.set_capacity(4 * kChunk);
  std::jthread other([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const CUdeviceptr address = alloc_with("t", kSplitNone, 2 * kChunk);
      EXPECT_TRUE(is_zero(address, 2 * kChunk));
      fill(address, 2 * kChunk, 3);
      deallocate(core(), address);
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    core().budgets.device.set_limit(round % 2 == 0 ? 3 * kChunk : kUnlimited);
    if (round % 3 == 0) promote({"w"});
    pause({"w"});
    core().budgets.device.set_limit(kUnlimited);
    resume({"w"});
  }
  other.request_stop();
  other.join();
  expect_resident("in the end");
}

}  // namespace
}  // namespace ebbtide::testing
