// What AMD's drivers were seen to do (csrc/DESIGN.md, F48 to F52), as the simulator does with its quirks: nothing is
// lost, freed bytes are free, and no old byte is shown. By CUDA's names none of it is done.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "core/operation/pending.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "vmm/deferred_undos.h"
#include "vmm/held_addresses.h"

namespace ebbtide::testing {
namespace {

class HipWays : public CoreTest {
 protected:
  void SetUp() override {
    if (!is_hip()) GTEST_SKIP() << "the simulator is called by CUDA's names";
  }
  ~HipWays() override { ::unsetenv("EBBTIDE_SIM_QUIRKS"); }
  void begin_with(const char* quirk) {
    ::setenv("EBBTIDE_SIM_QUIRKS", quirk, 1);
    restart();
  }
  static uint64_t free_bytes() {
    size_t free = 0, total = 0;
    check(driver().cuMemGetInfo(&free, &total), "cuMemGetInfo");
    return free;
  }
  // Not before the simulator has freed what was given back late.
  static uint64_t free_bytes_in_the_end() {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return free_bytes();
  }
};

TEST_F(HipWays, APauseFreesMemoryThatTheDriverHoldsForTheAddresses) {
  for (const char* quirk : {"held", "all"}) {
    begin_with(quirk);
    const uint64_t free_before = free_bytes();
    const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, 2 * kChunk});
    fill(address, 3 * kChunk, 7);
    for (int turn = 0; turn < 3; ++turn) {
      pause();
      EXPECT_EQ(free_bytes_in_the_end(), free_before);
      resume();
      EXPECT_TRUE(holds(address, 3 * kChunk, 7));
    }
    deallocate(core(), address);
    EXPECT_EQ(free_bytes_in_the_end(), free_before);
  }
}

// By the driver's own ranges it would not.
TEST_F(HipWays, TheQuirkHoldsMemoryForAsLongAsItsRangeIsReserved) {
  begin_with("held");
  const uint64_t free_before = free_bytes();
  PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
  CUdeviceptr address = 0;
  check(driver().cuMemAddressReserve(&address, kChunk, 0, 0, 0), "cuMemAddressReserve");
  check(driver().cuMemMap(address, kChunk, 0, memory.handle(), 0), "cuMemMap");
  check(driver().cuMemUnmap(address, kChunk), "cuMemUnmap");
  memory.release();
  EXPECT_EQ(free_bytes(), free_before - kChunk);
  check(driver().cuMemAddressFree(address, kChunk), "cuMemAddressFree");
  EXPECT_EQ(free_bytes(), free_before);
}

TEST_F(HipWays, NoThreadThatMapsMemoryMeanwhileGetsTheAddresses) {
  begin_with("held");
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk, kChunk});
  fill(address, 3 * kChunk, 1);
  std::atomic<bool> ends{false};
  std::atomic<int> taken{0};
  std::jthread other([&] {
    while (!ends) {
      void* const found = ::mmap(nullptr, kChunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      const auto at = reinterpret_cast<CUdeviceptr>(found);
      taken += at + kChunk > address && at < address + 3 * kChunk ? 1 : 0;
      ::munmap(found, kChunk);
    }
  });
  for (int turn = 0; turn < 30; ++turn) {
    pause();
    resume();
    ASSERT_TRUE(holds(address, 3 * kChunk, 1));
  }
  ends = true;
  other.join();
  EXPECT_EQ(taken, 0);
}

TEST_F(HipWays, ARangeThatIsNotFreedIsFreedLater) {
  begin_with("held");
  const uint64_t free_before = free_bytes();
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk});
  fill(address, kChunk, 3);
  sim().fail("cuMemAddressFree", 1, kOther, 2);
  pause();
  EXPECT_EQ(deferred_undos::held_bytes(0), kChunk);
  EXPECT_THROW(resume(), StateError) << "the driver has the range still";
  resume();
  EXPECT_TRUE(holds(address, kChunk, 3));
  EXPECT_EQ(deferred_undos::held_bytes(0), 0u);
  pause();
  EXPECT_EQ(free_bytes(), free_before);
  resume();
}

TEST_F(HipWays, AddressesThatAnotherHasTakenAreRefusedAndLeftAlone) {
  const CUdeviceptr range = held_addresses::hold(4 * kChunk);
  held_addresses::lend(range + kChunk, kChunk);
  // The driver says that it has freed the part, and the other's memory is what lies there now.
  sim().fail("cuMemAddressFree", 1, CUDA_ERROR_DEINITIALIZED, 1);
  EXPECT_EQ(held_addresses::take_back(range + kChunk, kChunk), CUDA_ERROR_DEINITIALIZED);
  EXPECT_THROW(held_addresses::lend(range + kChunk, kChunk), StateError);
  EXPECT_THROW(held_addresses::lend(range, 2 * kChunk), StateError);
  held_addresses::lend(range + 2 * kChunk, kChunk);
  EXPECT_EQ(held_addresses::take_back(range + 2 * kChunk, kChunk), CUDA_SUCCESS);
  held_addresses::let_go(range, 4 * kChunk);
  EXPECT_EQ(Live::now().reservations, 1u) << "the other's stays";
  check(driver().cuMemAddressFree(range + kChunk, kChunk), "cuMemAddressFree");
  EXPECT_NE(::madvise(reinterpret_cast<void*>(range), kChunk, MADV_NORMAL), 0) << "nothing is held there";
}

TEST_F(HipWays, ADriverThatGivesOtherAddressesIsRefused) {
  const CUdeviceptr range = held_addresses::hold(kChunk);
  for (const int code : {kOther, kOutOfMemory}) {
    sim().fail("cuMemAddressReserve", 1, code, 1);
    EXPECT_THROW(held_addresses::lend(range, kChunk), DriverError);
  }
  held_addresses::lend(range, kChunk);
  EXPECT_EQ(held_addresses::take_back(range, kChunk), CUDA_SUCCESS);
  held_addresses::let_go(range, kChunk);
}

TEST_F(HipWays, NewMemoryShowsNoOldBytes) {
  for (const char* quirk : {"stale", "all"}) {
    begin_with(quirk);
    const CUdeviceptr dropped = alloc_chunks("w", BackupKind::kNone, 0, {kChunk, kChunk});
    const CUdeviceptr zeros = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
    ASSERT_FALSE(is_zero(dropped, kChunk)) << "the quirk is off";
    fill(dropped, 2 * kChunk, 1);
    std::memset(reinterpret_cast<void*>(zeros), 0, kChunk);
    fill(zeros + kChunk, kChunk, 2);
    const auto is_right = [&] {
      return is_zero(dropped, 2 * kChunk) && is_zero(zeros, kChunk) && holds(zeros + kChunk, kChunk, 2);
    };
    pause();
    resume();
    EXPECT_TRUE(is_right()) << quirk;
    pause();
    PendingResume::start(claim(OperationKind::kResume))->wait();
    EXPECT_TRUE(is_right()) << quirk << ", in the background";
    deallocate(core(), dropped);
    deallocate(core(), zeros);
  }
}

TEST_F(HipWays, NoHandleIsTooLarge) {
  for (const char* quirk : {"handles", "all"}) {
    begin_with(quirk);
    const CUdeviceptr address = alloc("w", 300 * kMiB, BackupKind::kNone);
    const CUdeviceptr neighbour = alloc("w", 200 * kMiB, BackupKind::kNone);
    pause();
    resume();
    EXPECT_EQ(resident_bytes("w"), 500 * kMiB);
    deallocate(core(), address);
    deallocate(core(), neighbour);
  }
}

TEST_F(HipWays, WhatWasGivenBackIsWaitedFor) {
  for (const char* quirk : {"late", "all"}) {
    begin_with(quirk);
    sim().set_capacity(0, 16 * kMiB);
    const CUdeviceptr first = alloc("first", 12 * kMiB);
    fill(first, 12 * kMiB, 4);
    pause({"first"});
    EXPECT_LT(free_bytes(), 12 * kMiB) << "the quirk is off";
    const CUdeviceptr second = alloc("second", 12 * kMiB);
    pause({"second"});
    resume({"first"});
    EXPECT_TRUE(holds(first, 12 * kMiB, 4));
    EXPECT_THROW(alloc("third", 64 * kMiB), Error) << "never there, so not waited for";
    deallocate(core(), first);
    deallocate(core(), second);
  }
}

TEST_F(HipWays, WithoutHostMemoryThereIsNoOverflow) {
  begin_with("host");
  EXPECT_FALSE(host_location(0).has_value());
}

}  // namespace
}  // namespace ebbtide::testing
