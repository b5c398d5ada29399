// Several threads on one core. Besides their own expectations, these tests rely on ThreadSanitizer.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

TEST_F(ThreadsTest, Invariant12_MallocAndFreeNeverWaitForAPauseNotEvenOnTheirOwnTag) {
  const CUdeviceptr leaving = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  const CUdeviceptr doomed = alloc_chunks("w", BackupKind::kRam, 0, {kChunk});
  const CUdeviceptr other = alloc("other", kChunk);
  fill(leaving, 5 * kChunk, 1);
  Slow slow("cuMemcpyDtoHAsync", kStand, [&] { pause({"w"}); });
  const CUdeviceptr fresh = alloc("w", kChunk);
  deallocate(core(), doomed);
  EXPECT_EQ(core().registry.find(doomed), nullptr) << "freed, although an operation holds it";
  EXPECT_THROW(deallocate(core(), doomed), InvalidArgument);
  deallocate(core(), other);
  deallocate(core(), alloc("other", kChunk));
  EXPECT_NE(core().registry.find(leaving), nullptr);
  EXPECT_FALSE(core().registry.is_away(fresh, kChunk));
  EXPECT_TRUE(open_lease(core(), "w", "x").is_away);
  EXPECT_TRUE(slow.is_running()) << "all of that happened in the middle of the pause";
  slow.join();
  EXPECT_EQ(resident_bytes("w"), kChunk) << "later allocations are resident";
  EXPECT_EQ(allocation_count(), 2u) << "the operation has freed the doomed ones";
  resume();
  EXPECT_TRUE(holds(leaving, 5 * kChunk, 1));
  deallocate(core(), fresh);
  deallocate(core(), leaving);
  expect_no_leak();
}

TEST_F(ThreadsTest, Invariant12_MallocAndFreeNeverWaitForAResume) {
  const CUdeviceptr returning = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  const CUdeviceptr doomed = alloc_chunks("w", BackupKind::kRam, 0, {kChunk});
  fill(returning, 5 * kChunk, 1);
  pause();
  {
    Slow slow("cuMemcpyHtoDAsync", kStand, [&] { resume(); });
    deallocate(core(), doomed);
    deallocate(core(), alloc("w", kChunk));
    EXPECT_TRUE(slow.is_running());
  }
  EXPECT_TRUE(holds(returning, 5 * kChunk, 1));
  EXPECT_EQ(core().budgets.device.held_bytes(0), 6 * kChunk) << "what came back behind one handle goes as a whole";
  pause();
  resume();
  EXPECT_TRUE(holds(returning, 5 * kChunk, 1));
  EXPECT_EQ(Live::now().device_bytes, 5 * kChunk);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 5 * kChunk);
  deallocate(core(), returning);
  expect_no_leak();
}

TEST_F(ThreadsTest, EverythingFreedInTheMiddleOfAnOperationGoesWithIt) {
  for (const OperationKind kind : {OperationKind::kPause, OperationKind::kResume}) {
    std::vector<CUdeviceptr> all;
    for (int i = 0; i < 6; ++i)
      all.push_back(alloc_chunks("w", i % 2 == 0 ? BackupKind::kRam : BackupKind::kNone, i % 2, {kChunk, kChunk}));
    for (size_t i = 0; i < all.size(); ++i) fill(all[i], 2 * kChunk, i);
    if (kind == OperationKind::kResume) pause();
    Slow slow(kind == OperationKind::kPause ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync", kStand,
              [&] { claim(kind)->commit(); });
    for (const CUdeviceptr address : all) deallocate(core(), address);
    EXPECT_TRUE(slow.is_running());
    slow.join();
    EXPECT_EQ(allocation_count(), 0u);
    EXPECT_EQ(Live::now().handles + Live::now().reservations, 0u);
    EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
    EXPECT_EQ(core().budgets.device.held_bytes(0) + core().budgets.device.held_bytes(1), 0u);
    const LeaseInfo lease = open_lease(core(), "w", "x");
    EXPECT_FALSE(lease.is_away);
    core().registry.leases.close(lease.id);
  }
}

TEST_F(ThreadsTest, AFailedOperationFreesWhatItHeldToo) {
  const CUdeviceptr kept = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  const CUdeviceptr doomed = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  fill(kept, 5 * kChunk, 1);
  sim().fail("cuMemUnmap", 7, 999, 1);
  {
    Slow slow("cuMemcpyDtoHAsync", kStand, [&] { EXPECT_THROW(pause(), DriverError); });
    deallocate(core(), doomed);
  }
  sim().clear_failures();
  EXPECT_EQ(Live::now().reservations, 1u);
  EXPECT_EQ(Live::now().handles, 0u);
  EXPECT_FALSE(is_partial("w")) << "all that is left of the tag is away";
  resume();
  EXPECT_TRUE(holds(kept, 5 * kChunk, 1));
}

TEST_F(ThreadsTest, EightThreadsAllocateAndFreeBesidePauseAndResumeOfTheirTags) {
  ::setenv("EBBTIDE_COPY_THREADS", "2", 1);
  sim().set_async(EBBTIDE_SIM_RANDOM, 1);
  const std::vector<std::string> tags = {"a", "b"};
  std::vector<CUdeviceptr> steady;
  for (int i = 0; i < 4; ++i) {
    steady.push_back(alloc_chunks(tags[static_cast<size_t>(i) % 2], BackupKind::kRam, i / 2, {kChunk, kChunk}));
    fill(steady.back(), 2 * kChunk, static_cast<uint64_t>(i));
  }
  std::atomic<bool> is_over{false};
  std::thread operations([&] {
    for (int round = 0; round < 12; ++round) {
      pause(round % 3 == 0 ? std::vector<std::string>{}
                           : std::vector<std::string>{tags[static_cast<size_t>(round) % 2]});
      resume();
    }
    is_over = true;
  });
  std::atomic<int> made{0};
  in_threads(8, [&](int thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    std::vector<CUdeviceptr> mine;
    while (!is_over || !mine.empty()) {
      if (!is_over && mine.size() < 3) {
        mine.push_back(alloc(tags[random() % 2], kChunk, random() % 2 == 0 ? BackupKind::kRam : BackupKind::kNone,
                             static_cast<int>(random() % 2)));
        ++made;
      } else {
        const size_t which = random() % mine.size();
        EXPECT_NE(core().registry.find(mine[which] + 17), nullptr);
        core().registry.is_away(mine[which], kChunk);
        deallocate(core(), mine[which]);
        mine.erase(mine.begin() + static_cast<long>(which));
      }
      std::this_thread::yield();
    }
  });
  operations.join();
  EXPECT_GT(made.load(), 8);
  resume();
  for (size_t i = 0; i < steady.size(); ++i) EXPECT_TRUE(holds(steady[i], 2 * kChunk, i));
  give_back_caches(core());
  EXPECT_EQ(Live::now().reservations, 4u);
  // A freed allocation that shares a handle leaves with the others.
  pause();
  EXPECT_EQ(Live::now().device_bytes, 0u);
  resume();
  EXPECT_EQ(Live::now().device_bytes, 8 * kChunk);
  EXPECT_EQ(core().budgets.device.held_bytes(0) + core().budgets.device.held_bytes(1), 8 * kChunk);
  EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
  for (size_t i = 0; i < steady.size(); ++i) EXPECT_TRUE(holds(steady[i], 2 * kChunk, i));
}

TEST_F(ThreadsTest, TwoOperationsAtOnceWaitForEachOtherAndNeverDeadlock) {
  std::vector<CUdeviceptr> all;
  for (const char* tag : {"a", "b", "c"}) {
    all.push_back(alloc_chunks(tag, BackupKind::kRam, 0, {kChunk}));
    fill(all.back(), kChunk, all.size());
  }
  std::atomic<uint64_t> left{0};
  std::atomic<uint64_t> returned{0};
  in_threads(4, [&](int thread) {
    const std::vector<std::vector<std::string>> orders = {{"a", "b"}, {"b", "a", "c"}, {"c"}, {}};
    for (int round = 0; round < 10; ++round) {
      const auto& tags = orders[static_cast<size_t>(thread + round) % orders.size()];
      left += pause(tags).totals().bytes;
      returned += resume(tags).totals().bytes;
    }
  });
  returned += resume().totals().bytes;
  EXPECT_EQ(left.load(), returned.load());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(holds(all[i], kChunk, i + 1));
}

TEST_F(ThreadsTest, TwoPausesOfOneTagMoveItOnce) {
  alloc_chunks("w", BackupKind::kRam, 0, kFive);
  std::atomic<uint64_t> bytes{0};
  in_threads(4, [&](int) { bytes += pause({"w"}).totals().bytes; });
  EXPECT_EQ(bytes.load(), 5 * kChunk);
  in_threads(4, [&](int) { bytes -= resume({"w"}).totals().bytes; });
  EXPECT_EQ(bytes.load(), 0u);
}

TEST_F(ThreadsTest, AClaimHoldsItsTagsUntilItIsCommittedOrAbandoned) {
  alloc("w", kChunk);
  alloc("other", kChunk);
  auto operation = claim(OperationKind::kPause, {"w"});
  std::atomic<bool> is_paused{false};
  std::thread waiting([&] {
    pause({"w"});
    is_paused = true;
  });
  pause({"other"});  // this tag is not concerned
  deallocate(core(), alloc("w", kChunk));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(is_paused);
  EXPECT_EQ(resident_bytes("w"), kChunk);
  operation->abandon();
  operation->abandon();
  EXPECT_THROW(operation->commit(), StateError);
  operation.reset();
  waiting.join();
  EXPECT_EQ(resident_bytes("w"), 0u);
}

TEST_F(ThreadsTest, Invariant3_AClaimAbandonedLeavesNoTrace) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  fill(address, 5 * kChunk, 1);
  for (const OperationKind kind : {OperationKind::kPause, OperationKind::kResume}) {
    core().engines.trim();
    const Live before = Live::now();
    const uint64_t device_bytes = core().budgets.device.held_bytes(0);
    const uint64_t host_bytes = core().budgets.host.held_bytes();
    {
      const auto operation = claim(kind, {"w"});
      EXPECT_FALSE(Live::now() == before) << "a claim takes its memory at once";
      if (kind == OperationKind::kResume) {
        EXPECT_EQ(core().budgets.device.held_bytes(0), 5 * kChunk);
      }
    }
    core().engines.trim();
    EXPECT_EQ(Live::now(), before);
    EXPECT_EQ(core().budgets.device.held_bytes(0), device_bytes);
    EXPECT_EQ(core().budgets.host.held_bytes(), host_bytes);
    if (kind == OperationKind::kPause) pause();
  }
  resume();
  EXPECT_TRUE(holds(address, 5 * kChunk, 1));
}

TEST_F(ThreadsTest, MemoryOfALeasedTagNeverLeaves) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk});
  std::atomic<int> pauses{0};
  std::atomic<int> refusals{0};
  std::atomic<int> leases_left{4};
  in_threads(6, [&](int thread) {
    if (thread < 2) {
      while (leases_left > 0) {
        try {
          pause({"w"});
          ++pauses;
          resume({"w"});
        } catch (const StateError&) {
          ++refusals;
          std::this_thread::yield();
        }
      }
      return;
    }
    for (int round = 0; round < 60; ++round) {
      const LeaseInfo lease = open_lease(core(), "w", "thread");
      if (!lease.is_away) {
        std::this_thread::yield();
        EXPECT_FALSE(core().registry.is_away(address, kChunk));
      }
      core().registry.leases.close(lease.id);
      std::this_thread::yield();
    }
    --leases_left;
  });
  EXPECT_GT(pauses.load() + refusals.load(), 0);
}

TEST_F(ThreadsTest, LooksFromOtherThreadsAreAlwaysAllowed) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  std::atomic<bool> is_over{false};
  std::thread operations([&] {
    for (int round = 0; round < 15; ++round) {
      pause();
      resume();
    }
    is_over = true;
  });
  in_threads(3, [&](int) {
    while (!is_over) {
      char tag[8];
      bool is_away = false;
      core().registry.find_in_handler(address, tag, sizeof tag, &is_away);
      const auto allocation = core().registry.find(address);
      ASSERT_NE(allocation, nullptr);
      EXPECT_LE(allocation->resident_bytes(), 5 * kChunk);
      if (const auto stored = core().registry.read(allocation->stored)) {
        EXPECT_NE(stored->backup->view(), nullptr);
      }
      EXPECT_LE(resident_bytes("w"), 5 * kChunk);
      core().budgets.host.held_bytes();
      core().budgets.device.held_bytes(0);
      core().events.after(0);
      std::this_thread::yield();
    }
  });
  operations.join();
}

TEST_F(ThreadsTest, AllocationsThatCompeteForTheLastMemoryNeverExceedIt) {
  sim().set_capacity(0, 6 * kChunk);
  core().budgets.device.set_limit(5 * kChunk);
  std::atomic<int> made{0};
  in_threads(8, [&](int) {
    for (int round = 0; round < 20; ++round) {
      try {
        const CUdeviceptr address = alloc("w", 2 * kChunk);
        ++made;
        EXPECT_LE(core().budgets.device.held_bytes(0), 5 * kChunk);
        EXPECT_LE(Live::now().device_bytes, 5 * kChunk);
        deallocate(core(), address);
      } catch (const OutOfMemory&) {
      }
    }
  });
  EXPECT_GT(made.load(), 0);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
