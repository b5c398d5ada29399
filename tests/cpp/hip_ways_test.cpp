// What AMD's drivers were seen to do (csrc/DESIGN.md, F48 to F52), as the simulator does with its quirks: nothing is
// lost, freed bytes are free, and no old byte is shown. By CUDA's names none of it is done.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "core/operation/pending.h"
#include "core/probe/capabilities.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "driver/hip.h"
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
  sim().fail("cuMemAddressFree", 1, kOther, 100);
  pause();
  EXPECT_EQ(deferred_undos::held_bytes(0), kChunk);
  EXPECT_THROW(resume(), StateError) << "the driver has the range still";
  sim().clear_failures();
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
  // What the driver keeps is as good as another's.
  sim().fail("cuMemAddressFree", 1, kOther, 1);
  EXPECT_EQ(held_addresses::take_back(range + kChunk, kChunk), kOther);
  EXPECT_THROW(held_addresses::lend(range + kChunk, kChunk), StateError);
  EXPECT_THROW(held_addresses::lend(range, 2 * kChunk), StateError);
  held_addresses::lend(range + 2 * kChunk, kChunk);
  EXPECT_EQ(held_addresses::take_back(range + 2 * kChunk, kChunk), CUDA_SUCCESS);
  held_addresses::let_go(range, 4 * kChunk);
  EXPECT_EQ(Live::now().reservations, 1u) << "the other's stays";
  EXPECT_EQ(held_addresses::take_back(range + kChunk, kChunk), CUDA_SUCCESS) << "its range is gone, and not held again";
  EXPECT_NE(::madvise(reinterpret_cast<void*>(range + kChunk), kChunk, MADV_NORMAL), 0);
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
    {
      const Reservation range = Reservation::reserve(kChunk);
      const PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
      const Mapping mapping = Mapping::map(range.address(), memory);
      ASSERT_FALSE(is_zero(range.address(), kChunk)) << "the quirk is off";
    }
    const CUdeviceptr dropped = alloc_chunks("w", BackupKind::kNone, 0, {kChunk, kChunk});
    const CUdeviceptr zeros = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
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
    // Nothing that is not there in the end is waited for, by a call that makes a part of it and gives that back,
    // either.
    const auto start = std::chrono::steady_clock::now();
    const uint64_t missing = free_bytes_in_the_end() + 2 * kMiB;
    for (int turn = 0; turn < 3; ++turn) EXPECT_THROW(alloc("third", missing), Error);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    deallocate(core(), first);
    deallocate(core(), second);
  }
}

TEST_F(HipWays, ProbesSayWhatTheDriverDoes) {
  const auto found = [](const std::string& name) {
    for (const Capability& each : probe_capabilities(0)) {
      if (each.name == name) return each.found;
    }
    return std::string("nothing");
  };
  begin_with("none");
  EXPECT_EQ(found("freed_memory"), "memory is free at once");
  EXPECT_EQ(found("new_memory"), "new memory read as zeros");
  begin_with("held");
  EXPECT_NE(found("freed_memory").find("while its addresses are reserved"), std::string::npos);
  begin_with("late");
  EXPECT_NE(found("freed_memory").find("free after"), std::string::npos) << found("freed_memory");
  begin_with("stale");
  EXPECT_NE(found("new_memory").find("old bytes"), std::string::npos);
  sim().fail("cuMemMap", 1, kOther, 100);
  EXPECT_NE(found("freed_memory").find("MemMap"), std::string::npos);
  sim().clear_failures();
}

TEST_F(HipWays, AnOlderHipTakesTheAddressOfADescriptor) {
  const PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0, true);
  const Descriptor file = memory.export_file();
  const auto import_with = [&](int version) {
    sim().set_driver_version(version);
    resolve_hip(::dlopen(EBBTIDE_SIM_PATH, RTLD_NOW | RTLD_LOCAL));
    EXPECT_TRUE(PhysicalMemory::import_file(file.file(), kChunk, 0).has_handle()) << version;
  };
  import_with(60342134);
  import_with(70051831);
  import_with(70125424);
}

TEST_F(HipWays, WithoutHostMemoryThereIsNoOverflow) {
  begin_with("host");
  EXPECT_FALSE(host_location(0).has_value());
}

}  // namespace
}  // namespace ebbtide::testing
