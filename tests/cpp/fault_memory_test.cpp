// Fault injection: allocations and frees with every driver call failing, and operations that find too little host or
// device memory.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>

#include "driver/context.h"
#include "fault_world.h"
#include "policy/copy_plan.h"
#include "sweep.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

constexpr uint64_t kTwoChunks = 130 * kMiB;  // with a backup: 128 MiB and 2 MiB

class AllocFaults : public FaultTest, public ::testing::WithParamInterface<uint64_t> {};

TEST_P(AllocFaults, Invariant3_AnAllocationThatFailsLeavesNothing) {
  const uint64_t size_bytes = GetParam();
  const auto one_alloc = [&] { return alloc("w", size_bytes, BackupKind::kRam, 1); };
  alloc("other", kChunk);
  const Live before = Live::now();
  CUcontext callers = nullptr;
  ASSERT_EQ(driver().cuCtxGetCurrent(&callers), CUDA_SUCCESS);
  const std::vector<std::string> names = calls_of([&] { deallocate(core(), one_alloc()); });
  for (const CallFailure& failure : failures_of(names)) {
    SCOPED_TRACE(failure.text());
    failure.inject();
    CUdeviceptr address = 0;
    try {
      address = one_alloc();
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(failure.code, kOutOfMemory);
      EXPECT_EQ(error.device, 1);
      EXPECT_EQ(error.shortage.requested_bytes, size_bytes);
    } catch (const DriverError& error) {
      EXPECT_EQ(error.code, failure.code);
      if (failure.times == 1 && !(is_hip() && error.call.starts_with("cuCtx"))) {  // one function stands for several
        EXPECT_EQ(error.call, failure.name);
      }
    }
    sim().clear_failures();
    ASSERT_EQ(driver().cuCtxSetCurrent(callers), CUDA_SUCCESS);  // the way back may be what has failed
    give_back_caches(core());
    if (address != 0) {
      EXPECT_TRUE(is_zero(address + size_bytes - kChunk, kChunk));
      deallocate(core(), address);
      give_back_caches(core());
    }
    EXPECT_EQ(deferred_undos::count(), 0u);
    EXPECT_EQ(Live::now(), before);
    EXPECT_EQ(core().budgets.device.held_bytes(1), 0u);
    EXPECT_EQ(allocation_count(), 1u);
    const CUdeviceptr again = one_alloc();
    EXPECT_EQ(core().budgets.device.held_bytes(1), size_bytes);
    deallocate(core(), again);
    ASSERT_EQ(Live::now(), before);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, AllocFaults, ::testing::Values(kChunk, kTwoChunks));

enum class Before { kResident, kPaused, kPartial, kDropped };

class FreeFaults : public FaultTest, public ::testing::WithParamInterface<Before> {
 protected:
  void make() {
    build({{"w", BackupKind::kRam, 1, {kChunk, kChunk, kChunk}}});
    const Before before = GetParam();
    if (before == Before::kPaused) pause();
    if (before == Before::kDropped) pause({}, BackupKind::kNone);
    if (before == Before::kPartial) {
      sim().fail("cuMemUnmap", 2, kOther, 1);
      EXPECT_THROW(pause(), DriverError);
      sim().clear_failures();
      EXPECT_TRUE(is_partial("w"));
    }
    core().engines.trim();
  }
};

TEST_P(FreeFaults, Invariant3_AFreeThatFailsIsDoneLater) {
  make();
  const std::vector<std::string> names = calls_of([&] { deallocate(core(), blocks_[0].address); });
  EXPECT_EQ(Live::now(), Live{});
  for (const CallFailure& failure : failures_of(names)) {
    SCOPED_TRACE(failure.text());
    make();
    const CUdeviceptr address = blocks_[0].address;
    failure.inject();
    EXPECT_NO_THROW(deallocate(core(), address));
    sim().clear_failures();
    EXPECT_EQ(core().registry.find(address), nullptr);
    EXPECT_THROW(deallocate(core(), address), InvalidArgument);
    // Memory that was not released still counts, both as held memory and as deferred work.
    const uint64_t held_bytes = core().budgets.device.held_bytes(1);
    if (failure.name == "cuMemAddressFree" && is_hip()) {
      EXPECT_GE(held_bytes, Live::now().device_bytes) << "the driver may hold it with the addresses";
    } else {
      EXPECT_EQ(held_bytes, Live::now().device_bytes);
    }
    EXPECT_EQ(core().deferred_frees.count() + deferred_undos::count() > 0, !(Live::now() == Live{}));
    deallocate(core(), alloc("next", kChunk));  // any later call releases it
    EXPECT_EQ(Live::now(), Live{});
    EXPECT_EQ(core().budgets.device.held_bytes(1), 0u);
    EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(States, FreeFaults,
                         ::testing::Values(Before::kResident, Before::kPaused, Before::kPartial, Before::kDropped));

// Several threads copy. Which call is the k-th is random; the guarantees are not.
TEST_F(FaultTest, Invariant3_SeveralCopyThreadsWithEveryCallFailing) {
  ::setenv("EBBTIDE_COPY_THREADS", "4", 1);
  const std::vector<BlockSpec> specs = {{"w", BackupKind::kRam, 0, std::vector<uint64_t>(12, kChunk)},
                                        {"kv", BackupKind::kNone, 0, {kChunk}}};
  build(specs);
  core().rules.shared_handle_bytes = 0;
  pause();  // makes the ring and its events
  resume();
  const size_t pause_calls = calls_of([&] { pause(); }).size();
  expect_sound("paused");
  const size_t resume_calls = calls_of([&] { resume(); }).size();
  size_t failures = 0;
  size_t tries = 0;
  const auto try_both_ways = [&](size_t k, const std::function<void()>& act) {
    ++tries;
    sim().fail(nullptr, k, k % 2 == 0 ? kOutOfMemory : kOther, 1);
    try {
      act();
      sim().clear_failures();
    } catch (const Error&) {
      ++failures;
      sim().clear_failures();
      give_back_caches(core());
      expect_sound("after the failure");
      act();
    }
    give_back_caches(core());
    expect_sound("in the end");
  };
  for (size_t k = 1; k <= std::max(pause_calls, resume_calls) && !HasFailure(); k += 5) {
    SCOPED_TRACE("call " + std::to_string(k));
    try_both_ways(k, [&] { pause(); });
    EXPECT_EQ(resident_bytes("w") + resident_bytes("kv"), 0u);
    try_both_ways(k, [&] { resume(); });
    EXPECT_EQ(Live::now().handles, 13u);
  }
  // The others are made up for; more of them by HIP's names, where ranges are given back later and free bytes are read.
  EXPECT_GT((is_hip() ? 4 : 3) * failures, 2 * tries);
}

class ShortageTest : public FaultTest {
 protected:
  // act throws E. Then everything is as before, except for the ring.
  template <typename E>
  E expect_refused(const std::function<void()>& act) {
    const std::vector<Place> before = places();
    const Live live = without_lost(Live::now());
    const uint64_t backup_bytes = core().budgets.host.held_bytes() - core().engines.held_bytes();
    E caught = E("nothing was thrown", {});
    try {
      act();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const E& error) {
      caught = error;
    } catch (const std::exception& error) {
      ADD_FAILURE() << "another error: " << error.what();
    }
    EXPECT_EQ(places(), before);
    EXPECT_EQ(without_lost(Live::now()), live);
    EXPECT_EQ(core().budgets.host.held_bytes() - core().engines.held_bytes(), backup_bytes);
    EXPECT_FALSE(is_partial("w"));
    expect_sound("refused");
    return caught;
  }
  void expect_round_trip() {
    pause();
    expect_sound("paused");
    resume();
    expect_sound("resumed");
  }
};

TEST_F(ShortageTest, Invariant7_HostLimitRefusesAPauseBeforeAnythingMoves) {
  build({{"w", BackupKind::kRam, 0, {kChunk, kChunk}},
         {"w", BackupKind::kRam, 0, {kChunk}},
         {"kv", BackupKind::kNone, 0, {kChunk}}});
  for (const uint64_t limit : {uint64_t{0}, kChunk, 3 * kChunk - 1}) {
    core().budgets.host.set_limit(limit);
    const StoreError error = expect_refused<StoreError>([&] { pause(); });
    EXPECT_EQ(error.shortage.requested_bytes, 3 * kChunk) << "what the whole pause needs";
    EXPECT_EQ(error.shortage.free_bytes, limit);
    EXPECT_EQ(error.shortage.limit_bytes, limit);
  }
  // The backups fit, but not even the smallest ring does beside them.
  core().budgets.host.set_limit(3 * kChunk);
  expect_refused<StoreError>([&] { pause(); });
  core().budgets.host.set_limit(3 * kChunk + policy::kLeastRingBytes);
  expect_round_trip();
}

TEST_F(ShortageTest, WithoutABackupNoHostMemoryIsNeeded) {
  build({{"kv", BackupKind::kNone, 0, {kChunk, kChunk}}});
  core().budgets.host.set_limit(0);
  pause();
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  resume();
}

TEST_F(ShortageTest, AMarginLargerThanTheMachineRefusesAPause) {
  build({{"w", BackupKind::kRam, 0, {kChunk}}});
  core().budgets.host.set_margin(kUnlimited - 1);
  EXPECT_EQ(expect_refused<StoreError>([&] { pause(); }).shortage.free_bytes, 0u);
  core().budgets.host.set_margin(0);
  expect_round_trip();
}

TEST_F(ShortageTest, APartialPauseNeedsNoHostMemoryTwice) {
  build({{"w", BackupKind::kRam, 0, {kChunk, kChunk, kChunk}}});
  core().rules.shared_handle_bytes = 0;
  core().budgets.host.set_limit(3 * kChunk + policy::kLeastRingBytes);
  for (int round = 0; round < 3; ++round) {
    sim().fail("cuMemUnmap", 2, kOther, 1);
    EXPECT_THROW(pause(), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(is_partial("w"));
    pause();
    EXPECT_EQ(core().budgets.host.held_bytes() - core().engines.held_bytes(), 3 * kChunk);
    sim().fail("cuEventSynchronize", 3, kOther, 1);
    EXPECT_THROW(resume(), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(is_partial("w"));
    pause();  // what is back is paused again, into its place in the backup
    EXPECT_EQ(core().budgets.host.held_bytes() - core().engines.held_bytes(), 3 * kChunk);
    resume();
    expect_sound("resumed");
    EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
  }
}

TEST_F(ShortageTest, PinnedMemoryRefusedIsAStoreErrorBeforeAnythingMoves) {
  build({{"w", BackupKind::kRam, 0, {kChunk}}});
  sim().fail("cuMemHostRegister", 1, kOutOfMemory, 0);
  expect_refused<StoreError>([&] { pause(); });
  sim().clear_failures();
  sim().fail("cuMemHostRegister", 1, kOther, 0);
  EXPECT_THROW(pause(), DriverError);
  sim().clear_failures();
  expect_round_trip();
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(ShortageTest, AddressSpaceRefusedIsAStoreErrorBeforeAnythingMoves) {
  build({{"w", BackupKind::kRam, 0, {kChunk}}});
  const CUdeviceptr large = alloc("w", 128 * kMiB);
  long pages = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(std::fscanf(file, "%ld", &pages), 1);
  std::fclose(file);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  const rlimit tight = {static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE)) + 64 * kMiB, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  try {
    pause();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_EQ(error.shortage.requested_bytes, 128 * kMiB);
  }
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(resident_bytes("w"), 128 * kMiB + kChunk);
  EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
  pause();
  EXPECT_EQ(resident_bytes("w"), 0u);
  deallocate(core(), large);
}
#endif

TEST_F(ShortageTest, Invariant3_ResumeWithoutRoomMovesNothingAndWorksOnceThereIs) {
  build({{"w", BackupKind::kRam, 0, {kChunk, kChunk}}, {"w", BackupKind::kRam, 1, {kChunk, kChunk}}});
  pause();
  for (const int tight : {0, 1}) {
    sim().set_capacity(tight, kChunk);
    try {
      resume();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.device, tight);
      EXPECT_EQ(error.shortage.requested_bytes, 2 * kChunk);
      EXPECT_EQ(error.shortage.free_bytes, kChunk);
    }
    expect_sound("refused");
    EXPECT_EQ(resident_bytes("w"), 0u);
    EXPECT_FALSE(is_partial("w"));
    sim().set_capacity(tight, kGiB);
  }
  core().budgets.device.set_limit(kChunk);
  EXPECT_THROW(resume(), OutOfMemory);
  expect_sound("refused by device_limit");
  core().budgets.device.set_limit(2 * kChunk);
  resume();
  expect_sound("resumed");
}

// The second device runs out of memory, and memory of a deferred free makes room there. The memory that the first
// device received meanwhile must stay.
TEST_F(ShortageTest, ResumeOnTwoDevicesTriesAgainWithWhatWasGivenBack) {
  build({{"w", BackupKind::kRam, 0, {kChunk}}, {"w", BackupKind::kRam, 1, {kChunk, kChunk}}});
  const CUdeviceptr stuck = alloc("stuck", kChunk, BackupKind::kNone, 1);
  pause({"w"});
  sim().set_capacity(1, 2 * kChunk);
  sim().fail("cuMemRelease", 1, kOther, 1);
  deallocate(core(), stuck);  // its handle can't be released now
  sim().clear_failures();
  ASSERT_EQ(deferred_undos::count(), 1u);
  sim().fail("cuMemRelease", 1, kOther, 1);  // nor when the operation begins
  resume({"w"});
  sim().clear_failures();
  expect_sound("resumed");
  EXPECT_EQ(resident_bytes("w"), 3 * kChunk);
}

// The same if the budget refuses.
TEST_F(ShortageTest, ResumeOnTwoDevicesTriesAgainWithTheBudgetThatWasGivenBack) {
  build({{"w", BackupKind::kRam, 0, {kChunk}}, {"w", BackupKind::kRam, 1, {kChunk, kChunk}}});
  const CUdeviceptr stuck = alloc("stuck", kChunk, BackupKind::kNone, 1);
  pause({"w"});
  core().budgets.device.set_limit(2 * kChunk);
  sim().fail("cuMemRelease", 1, kOther, 1);
  deallocate(core(), stuck);
  sim().clear_failures();
  EXPECT_EQ(core().budgets.device.held_bytes(1), kChunk);
  sim().fail("cuMemRelease", 1, kOther, 1);
  resume({"w"});
  sim().clear_failures();
  expect_sound("resumed");
  EXPECT_EQ(resident_bytes("w"), 3 * kChunk);
}

}  // namespace
}  // namespace ebbtide::testing
