// Unit tests of small parts of the core: registry, capture gate, event log, slots, device budget.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core_fixture.h"

namespace ebbtide::testing {
namespace {

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(TagNames, GoodAndBadNames) {
  for (const std::string good : {"w", "weights v2", "\xC3\xBC\xE2\x9C\x93\xF0\x9F\x8C\x8A", "a.b:c-d_e", "..."})
    EXPECT_NO_THROW(check_tag_name(good)) << good;
  EXPECT_NO_THROW(check_tag_name(std::string(255, 'x')));
  for (const std::string bad : {"", "*", "a*", "a/b", "/", "a\nb", "a\tb", "\x7f"})
    EXPECT_THROW(check_tag_name(bad), InvalidArgument) << bad;
  EXPECT_THROW(check_tag_name(std::string("a\0b", 3)), InvalidArgument);
  EXPECT_THROW(check_tag_name(std::string(256, 'x')), InvalidArgument);
  const std::string message = message_of([] { check_tag_name(std::string(1 << 20, 'x')); });
  EXPECT_LT(message.size(), 200u) << "a 1 MB tag is not quoted whole";
}

using RegistryTest = CoreTest;

TEST_F(RegistryTest, FindsByAnyAddressInside) {
  const CUdeviceptr first = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, kChunk, 2 * kChunk - 1})
    EXPECT_NE(core().registry.find(first + offset), nullptr);
  EXPECT_EQ(core().registry.find(first - 1), nullptr);
  EXPECT_EQ(core().registry.find(first + 2 * kChunk), nullptr);
  EXPECT_EQ(core().registry.find(0), nullptr);
  EXPECT_EQ(core().registry.find(UINT64_MAX), nullptr);
}

TEST_F(RegistryTest, IsAwayLooksAtTheRangeAndAtNothingElse) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk, kChunk});
  sim().fail("cuMemUnmap", 2, 999, 1);
  EXPECT_THROW(pause(), DriverError);  // the first chunk is away
  const Registry& registry = core().registry;
  EXPECT_TRUE(registry.is_away(address, 1));
  EXPECT_TRUE(registry.is_away(address, 0)) << "no bytes are asked about as one is";
  EXPECT_TRUE(registry.is_away(address + kChunk - 1, 2));
  EXPECT_FALSE(registry.is_away(address + kChunk, 2 * kChunk));
  EXPECT_FALSE(registry.is_away(address + kChunk, UINT64_MAX));
  EXPECT_TRUE(registry.is_away(0x1000, UINT64_MAX)) << "the range contains the allocation";
}

TEST_F(RegistryTest, IsAwayLooksAtEveryAllocationThatTheRangeTouches) {
  std::vector<std::pair<CUdeviceptr, std::string>> all;  // by address
  for (const std::string tag : {"a", "b", "c"}) all.emplace_back(alloc(tag, kChunk), tag);
  std::sort(all.begin(), all.end());
  const auto [first, away, last] = std::tuple(all[0].first, all[1].first, all[2].first);
  pause({all[1].second});
  const Registry& registry = core().registry;
  const std::vector<bool (*)(const Registry&, CUdeviceptr, size_t)> looks = {
      [](const Registry& each, CUdeviceptr address, size_t size_bytes) { return each.is_away(address, size_bytes); },
      [](const Registry& each, CUdeviceptr address, size_t size_bytes) {
        return each.is_missing(address, size_bytes);
      }};
  for (const auto& is_any_away : looks) {
    EXPECT_TRUE(is_any_away(registry, first, last + kChunk - first)) << "over all of it";
    EXPECT_TRUE(is_any_away(registry, first, away + 1 - first)) << "its first byte";
    EXPECT_FALSE(is_any_away(registry, first, away - first));
    EXPECT_TRUE(is_any_away(registry, away - 1, 2)) << "whatever lies before it";
    EXPECT_FALSE(is_any_away(registry, away - 1, 1)) << "it ends before";
    EXPECT_FALSE(is_any_away(registry, away + kChunk, 1));
    EXPECT_TRUE(is_any_away(registry, away + kChunk - 1, UINT64_MAX)) << "cut at the last address";
  }
  deallocate(core(), away);
  for (const auto& is_any_away : looks) EXPECT_FALSE(is_any_away(registry, 1, UINT64_MAX));
}

TEST_F(RegistryTest, IsAwayLeavesOutWhatWasFreedMeanwhile) {
  const CUdeviceptr address = alloc("w", kChunk);
  pause();
  const auto operation = claim(OperationKind::kResume);
  deallocate(core(), address);
  EXPECT_FALSE(core().registry.is_away(address, kChunk));
  EXPECT_FALSE(core().registry.is_away(address - 1, kChunk));
  char tag[8];
  bool is_away = false;
  EXPECT_FALSE(core().registry.find_in_handler(address, tag, sizeof tag, &is_away));
}

TEST_F(RegistryTest, TheSignalHandlersLookUpNeverWaits) {
  const CUdeviceptr address = alloc("w", kChunk);
  char tag[8];
  bool is_away = true;
  ASSERT_TRUE(core().registry.find_in_handler(address + 5, tag, sizeof tag, &is_away));
  EXPECT_STREQ(tag, "w");
  EXPECT_FALSE(is_away);
  pause();
  ASSERT_TRUE(core().registry.find_in_handler(address, tag, 1, &is_away));
  EXPECT_STREQ(tag, "") << "cut, and ended";
  EXPECT_TRUE(is_away);
  EXPECT_FALSE(core().registry.find_in_handler(address, tag, 0, &is_away));
  EXPECT_FALSE(core().registry.find_in_handler(0x1000, tag, sizeof tag, &is_away));
  bool found = true;
  // The lock is held here, so another thread's signal handler must give up.
  core().registry.visit_tags([&](const Tag&) {
    std::thread([&] { found = core().registry.find_in_handler(address, tag, sizeof tag, &is_away); }).join();
  });
  EXPECT_FALSE(found);
  // Nor does that of the thread that has the lock wait for itself.
  found = true;
  core().registry.visit_tags(
      [&](const Tag&) { found = core().registry.find_in_handler(address, tag, sizeof tag, &is_away); });
  EXPECT_FALSE(found);
  EXPECT_TRUE(core().registry.find_in_handler(address, tag, sizeof tag, &is_away)) << "once it is free again";
}

TEST_F(RegistryTest, AnUnknownTagListsTheKnownOnes) {
  alloc("weights", kChunk);
  for (int i = 0; i < 30; ++i) core().registry.tag("t" + std::to_string(i));
  const std::string message = message_of([&] { pause({"nobody"}); });
  EXPECT_TRUE(mentions(message, "'nobody'")) << message;
  EXPECT_TRUE(mentions(message, "'t0'")) << message;
  EXPECT_TRUE(mentions(message, "11 more")) << message;
  EXPECT_EQ(resident_bytes("weights"), kChunk);
  // One wrong name among right ones: nothing moves, no epoch advances, no tag stays held.
  EXPECT_THROW(pause({"weights", "nobody"}), StateError);
  EXPECT_EQ(open_lease(core(), "weights", "me").epoch, 0u);
}

TEST_F(RegistryTest, DuplicateTagsAreOne) {
  alloc("w", kChunk);
  EXPECT_EQ(pause({"w", "w", "w"}).totals().bytes, kChunk);
  EXPECT_EQ(resume({"w", "w"}).totals().bytes, kChunk);
}

TEST_F(RegistryTest, ALeaseRefusesPauseNamesItsHolderAndCountsPauses) {
  Registry& registry = core().registry;
  const LeaseInfo lease = open_lease(core(), "w", "thread 'trainer'");
  EXPECT_EQ(lease.epoch, 0u);
  EXPECT_FALSE(lease.is_away);
  alloc("w", kChunk);
  EXPECT_TRUE(mentions(message_of([&] { pause(); }), "thread 'trainer'"));
  EXPECT_EQ(resident_bytes("w"), kChunk);
  resume();  // leases do not hinder a resume
  registry.leases.close(lease.id);
  EXPECT_THROW(registry.leases.close(lease.id), InvalidArgument);
  EXPECT_THROW(registry.leases.close(12345), InvalidArgument);
  pause();
  const LeaseInfo away = open_lease(core(), "w", "x");
  EXPECT_EQ(away.epoch, 1u);
  EXPECT_TRUE(away.is_away);
  EXPECT_NE(away.id, lease.id);
  resume();
  registry.leases.close(away.id);
  EXPECT_FALSE(open_lease(core(), "w", "y").is_away);
}

// Otherwise a region that is entered during a prepare would get a new pool, which lives as long as the process.
TEST_F(RegistryTest, ATagIsPresentWhileItsBackupsArePrepared) {
  alloc("w", kChunk);
  const auto take_lease = [&] {
    const LeaseInfo lease = open_lease(core(), "w", "x");
    core().registry.leases.close(lease.id);
    return lease;
  };
  {
    const auto preparing = Operation::claim(core(), OperationKind::kPrepare, {});
    EXPECT_FALSE(take_lease().is_away);
  }
  const auto pausing = Operation::claim(core(), OperationKind::kPause, {});
  EXPECT_TRUE(take_lease().is_away);
}

TEST_F(RegistryTest, FreeingAbsentMemoryMakesTheTagPresentAgain) {
  const CUdeviceptr address = alloc("w", kChunk);
  alloc("w", kChunk);
  pause();
  const CUdeviceptr fresh = alloc("w", kChunk);
  deallocate(core(), address);
  EXPECT_TRUE(open_lease(core(), "w", "x").is_away);
  for (const auto& allocation : std::vector{core().registry.find(fresh)}) EXPECT_FALSE(allocation->is_away());
}

TEST_F(RegistryTest, ATagWhosePartialMemoryWasFreedIsNotPartialAnyMore) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  const CUdeviceptr whole = alloc("w", kChunk);
  sim().fail("cuMemUnmap", 2, 999, 1);
  EXPECT_THROW(pause(), DriverError);
  EXPECT_TRUE(is_partial("w"));
  deallocate(core(), address);
  EXPECT_FALSE(is_partial("w")) << "all that is left is resident";
  EXPECT_FALSE(open_lease(core(), "w", "x").is_away);
  deallocate(core(), whole);
}

TEST_F(RegistryTest, SequencesRise) {
  const CUdeviceptr a = alloc("w", kChunk);
  const CUdeviceptr b = alloc("w", kChunk);
  EXPECT_LT(core().registry.find(a)->sequence, core().registry.find(b)->sequence);
}

TEST(CaptureGateTest, PermitsAndCapturesExcludeEachOther) {
  CaptureGate gate;
  auto first = gate.try_enter();
  auto second = gate.try_enter();
  ASSERT_TRUE(first && second);
  std::atomic<bool> has_begun{false};
  std::thread capturing([&] {
    gate.begin_capture();
    has_begun = true;
  });
  while (!gate.is_capturing()) std::this_thread::yield();
  EXPECT_FALSE(gate.try_enter()) << "a waiting capture lets no operation in, or it would wait for ever";
  first.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_FALSE(has_begun);
  second.reset();
  capturing.join();
  gate.begin_capture();  // captures of several threads may overlap
  gate.end_capture();
  EXPECT_FALSE(gate.try_enter());
  gate.end_capture();
  EXPECT_TRUE(gate.try_enter());
  EXPECT_THROW(gate.end_capture(), StateError);
}

TEST(EventLogTest, KeepsTheNewest) {
  EventLog log;
  EXPECT_TRUE(log.after(0).empty());
  for (size_t i = 0; i < EventLog::kCapacity + 10; ++i)
    log.add({.kind = "pause", .tags = "t", .bytes = i, .detail = ""});
  const auto all = log.after(0);
  ASSERT_EQ(all.size(), EventLog::kCapacity);
  EXPECT_EQ(all.front().sequence, 11u);
  EXPECT_EQ(all.back().sequence, EventLog::kCapacity + 10);
  EXPECT_EQ(all.back().bytes, EventLog::kCapacity + 9);
  EXPECT_GT(all.back().unix_seconds, 1.6e9);
  EXPECT_EQ(log.after(all.back().sequence - 1).size(), 1u);
  EXPECT_TRUE(log.after(UINT64_MAX).empty());
}

TEST_F(RegistryTest, EventsTellWhatHappened) {
  fill(alloc("a", kChunk), kChunk, 1);
  alloc("b", kChunk, BackupKind::kNone, 1);
  pause();
  resume({"a"});
  sim().set_capacity(1, 0);
  EXPECT_THROW(resume(), OutOfMemory);
  EXPECT_THROW(alloc("c", kChunk, BackupKind::kRam, 1), OutOfMemory);
  sim().fail("cuMemAddressReserve", 1, 999, 0);
  EXPECT_THROW(alloc("c", kChunk), DriverError);
  sim().clear_failures();
  sim().fail("cuCtxSynchronize", 1, 999, 1);
  EXPECT_THROW(pause(), DriverError);
  std::vector<std::string> kinds;
  for (const EventRecord& record : core().events.after(0)) kinds.push_back(record.kind);
  EXPECT_EQ(kinds, (std::vector<std::string>{"pause", "resume", "resume_failed", "out_of_memory", "pause_failed"}));
  const auto events = core().events.after(0);
  EXPECT_EQ(events[0].tags, "a, b");
  EXPECT_EQ(events[0].bytes, 2 * kChunk);
  EXPECT_EQ(events[0].copied, kChunk);
  EXPECT_TRUE(mentions(events[4].detail, name_in_use("cuCtxSynchronize")));
}

TEST(SlotTableTest, TheSameCombinationHasTheSameSlotAndSlotsRunOutWithAnError) {
  Registry registry;
  SlotTable slots(registry);
  const Policy ram{BackupKind::kRam};
  const Policy none{BackupKind::kNone};
  const int first = slots.bind("w", ram, 0);
  EXPECT_EQ(slots.bind("w", ram, 0), first);
  EXPECT_NE(slots.bind("w", none, 0), first);
  EXPECT_NE(slots.bind("w", ram, 1), first);
  EXPECT_EQ(slots.find(first)->tag->name, "w");
  EXPECT_EQ(slots.find(-1), nullptr);
  EXPECT_EQ(slots.find(3), nullptr);
  EXPECT_EQ(slots.find(1 << 30), nullptr);
  for (int i = 3; i < SlotTable::kCapacity; ++i) EXPECT_EQ(slots.bind("t" + std::to_string(i), ram, 0), i);
  EXPECT_TRUE(mentions(message_of([&] { slots.bind("one more", ram, 0); }), std::to_string(SlotTable::kCapacity)));
  EXPECT_EQ(slots.bind("w", ram, 0), first) << "those that are bound stay";
  EXPECT_THROW(slots.bind("a/b", ram, 0), InvalidArgument);
}

TEST(SlotTableTest, ThreadsThatBindTheSameGetTheSame) {
  Registry registry;
  SlotTable slots(registry);
  std::vector<std::vector<int>> found(8);
  std::vector<std::thread> threads;
  for (auto& mine : found) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        mine.push_back(slots.bind("t" + std::to_string(i), Policy{}, i % 3));
        ASSERT_NE(slots.find(mine.back()), nullptr);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& mine : found) EXPECT_EQ(mine, found.front());
}

TEST(DeviceBudgetTest, ChargesAreMovedSplitAndGivenBack) {
  DeviceBudget budget;
  budget.set_limit(100);
  {
    DeviceCharge charge = budget.charge(0, 60);
    DeviceCharge part = charge.split(20);
    EXPECT_EQ(budget.held_bytes(0), 60u);
    part = budget.charge(0, 40);
    EXPECT_EQ(budget.held_bytes(0), 80u);
    DeviceCharge moved = std::move(charge);
    DeviceCharge all = moved.split(1000);
    EXPECT_EQ(budget.held_bytes(0), 80u);
    EXPECT_THROW(budget.charge(0, 21), OutOfMemory);
    const DeviceCharge other = budget.charge(1, 100);  // each device has its own limit
    EXPECT_EQ(budget.held_bytes(1), 100u);
  }
  EXPECT_EQ(budget.held_bytes(0), 0u);
  EXPECT_EQ(budget.held_bytes(1), 0u);
  EXPECT_EQ(budget.held_bytes(-1), 0u);
  EXPECT_THROW(budget.charge(-1, 1), InvalidArgument);
  EXPECT_THROW(budget.charge(kMaxDevices, 1), InvalidArgument);
  EXPECT_THROW(budget.charge(0, UINT64_MAX), OutOfMemory);
  // A limit below the held amount refuses everything, and no subtraction wraps.
  const DeviceCharge held = budget.charge(0, 50);
  budget.set_limit(10);
  EXPECT_THROW(budget.charge(0, 1), OutOfMemory);
  EXPECT_NO_THROW(budget.charge(0, 0));
}

TEST(DeviceBudgetTest, Invariant7_TwoThreadsNeverPassOneCheckTogether) {
  DeviceBudget budget;
  budget.set_limit(1000);
  std::atomic<uint64_t> most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20000; ++round) {
        try {
          const DeviceCharge charge = budget.charge(0, 900);
          const uint64_t held = budget.held_bytes(0);
          for (uint64_t seen = most.load(); held > seen && !most.compare_exchange_weak(seen, held);) {
          }
        } catch (const OutOfMemory&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most.load(), 1000u);
  EXPECT_EQ(budget.held_bytes(0), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
