// Handles that pass from one side of a swap to the other: which change owners, which are created, and how many exist at
// any moment.
#include "core/operation/swapped_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"

namespace ebbtide::testing {
namespace {

constexpr uint64_t kOne = kChunk;
constexpr uint64_t kTwo = 2 * kChunk;

struct Held {
  DeviceCharge charge;
  PhysicalMemory memory;
};

class SwappedMemoryTest : public CoreTest {
 protected:
  SwappedMemoryTest() { check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent"); }
  Held hold(uint64_t size_bytes) {
    return {core().budgets.device.charge(0, size_bytes), PhysicalMemory::create_on_device(size_bytes, 0)};
  }
  static void offer(SwappedMemory& swapped, Held& held) { swapped.offer(held.memory, held.charge); }
  DeviceCharge charge(uint64_t size_bytes) { return core().budgets.device.charge(0, size_bytes); }
  static uint64_t created() { return sim().calls("cuMemCreate"); }
  static uint64_t live_bytes() { return Live::now().device_bytes; }
  uint64_t held_bytes() { return core().budgets.device.held_bytes(0); }
};

TEST_F(SwappedMemoryTest, AHandleGoesToWhoWantsItsSize) {
  Held leaving = hold(kOne);
  const auto handle = leaving.memory.handle();
  SwappedMemory swapped(0, kOne, kOne);
  swapped.announce(kOne);
  swapped.create_ahead({kOne}, 0, charge(0));
  const uint64_t before = created();
  offer(swapped, leaving);
  EXPECT_FALSE(leaving.memory.has_handle());
  SwappedMemory::Handle taken = swapped.take(kOne);
  EXPECT_EQ(taken.memory.handle(), handle);
  EXPECT_FALSE(taken.is_fresh) << "it holds what its last owner left there";
  EXPECT_EQ(taken.charge.size_bytes(), kOne);
  EXPECT_EQ(created(), before);
  EXPECT_EQ(held_bytes(), kOne);
}

// Several handles of one size are wanted, so the second finds a taker as well.
TEST_F(SwappedMemoryTest, AsManyHandlesAreHandedOverAsWereAnnounced) {
  std::vector<Held> leaving;
  for (int count = 0; count < 3; ++count) leaving.push_back(hold(kOne));
  SwappedMemory swapped(0, 3 * kOne, 3 * kOne);
  swapped.announce(kOne);
  swapped.announce(kOne);
  swapped.create_ahead({kOne, kOne}, 0, charge(0));
  for (Held& each : leaving) offer(swapped, each);
  EXPECT_EQ(live_bytes(), 2 * kOne) << "for the third there is no taker";
  const uint64_t before = created();
  EXPECT_FALSE(swapped.take(kOne).is_fresh);
  EXPECT_FALSE(swapped.take(kOne).is_fresh);
  EXPECT_EQ(created(), before);
}

TEST_F(SwappedMemoryTest, UnwantedHandlesAreMadeAnewInTheWantedSizes) {
  Held one = hold(kOne);
  Held other = hold(kOne);
  SwappedMemory swapped(0, kTwo, kTwo);
  swapped.announce(kTwo);
  swapped.create_ahead({kTwo}, 0, charge(0));
  offer(swapped, one);
  EXPECT_EQ(live_bytes(), kOne) << "released";
  offer(swapped, other);
  const SwappedMemory::Handle handle = swapped.take(kTwo);
  EXPECT_EQ(handle.is_fresh, PhysicalMemory::is_made_clear());
  EXPECT_EQ(handle.memory.size_bytes(), kTwo);
  EXPECT_EQ(handle.charge.size_bytes(), kTwo);
  EXPECT_EQ(live_bytes(), kTwo);
  EXPECT_EQ(held_bytes(), kTwo);
}

TEST_F(SwappedMemoryTest, WhatTheLimitAllowsIsMadeAheadAndNoMore) {
  Held leaving = hold(kTwo);
  SwappedMemory swapped(0, kTwo, kTwo + kOne);
  for (int count = 0; count < 3; ++count) swapped.announce(kOne);
  swapped.create_ahead({kOne, kOne, kOne}, kOne, charge(kOne));
  EXPECT_EQ(live_bytes(), kTwo + kOne);
  const SwappedMemory::Handle first = swapped.take(kOne);
  EXPECT_EQ(first.is_fresh, PhysicalMemory::is_made_clear());
  EXPECT_EQ(live_bytes(), kTwo + kOne);
  offer(swapped, leaving);
  EXPECT_EQ(live_bytes(), kOne);
  const SwappedMemory::Handle second = swapped.take(kOne);
  const SwappedMemory::Handle third = swapped.take(kOne);
  EXPECT_EQ(live_bytes(), 3 * kOne);
  EXPECT_EQ(held_bytes(), 3 * kOne);
}

// A piece that was made ahead has its taker. A handle of the same size that is offered later is released.
TEST_F(SwappedMemoryTest, APieceThatWasMadeAheadIsNotWantedTwice) {
  Held leaving = hold(kOne);
  SwappedMemory swapped(0, kOne, kTwo);
  swapped.announce(kOne);
  swapped.create_ahead({kOne}, kOne, charge(kOne));
  EXPECT_EQ(live_bytes(), kTwo);
  offer(swapped, leaving);
  EXPECT_EQ(live_bytes(), kOne);
  EXPECT_EQ(swapped.take(kOne).is_fresh, PhysicalMemory::is_made_clear());
}

TEST_F(SwappedMemoryTest, ThePlaceholderKeepsWhatNoWholePieceFitsInto) {
  Held leaving = hold(kOne);
  SwappedMemory swapped(0, kOne, kTwo);
  swapped.announce(kTwo);
  swapped.create_ahead({kTwo}, kOne, charge(kOne));
  EXPECT_EQ(live_bytes(), kTwo) << "no handle holds the difference";
  sim().set_capacity(0, kTwo);
  offer(swapped, leaving);
  EXPECT_EQ(live_bytes(), kOne);
  const SwappedMemory::Handle handle = swapped.take(kTwo);
  EXPECT_EQ(handle.memory.size_bytes(), kTwo);
  EXPECT_EQ(live_bytes(), kTwo) << "the placeholder went before";
}

// There is no room for the margin: the limit is lowered, but the required part is available.
TEST_F(SwappedMemoryTest, WhatCanNotBeHadBeyondTheRequiredBytesIsDoneWithout) {
  Held leaving = hold(kTwo);
  SwappedMemory swapped(0, kTwo, kTwo + kTwo);
  swapped.announce(kOne);
  swapped.announce(kOne);
  sim().set_capacity(0, kTwo + kOne);
  swapped.create_ahead({kOne, kOne}, kOne, charge(kTwo));
  EXPECT_EQ(live_bytes(), kTwo + kOne);
  const SwappedMemory::Handle first = swapped.take(kOne);
  offer(swapped, leaving);
  const SwappedMemory::Handle second = swapped.take(kOne);
  EXPECT_EQ(live_bytes(), kTwo);
}

TEST_F(SwappedMemoryTest, MissingRequiredMemoryIsAnError) {
  const Held leaving = hold(kOne);
  sim().set_capacity(0, kOne);
  SwappedMemory swapped(0, kOne, kTwo);
  swapped.announce(kOne);
  EXPECT_THROW(swapped.create_ahead({kOne}, kOne, charge(kOne)), DriverError);
  SwappedMemory other(0, kOne, kTwo);
  sim().fail("cuMemCreate", 1, CUDA_ERROR_UNKNOWN, 1);
  other.announce(kOne);
  EXPECT_THROW(other.create_ahead({kOne}, kOne, charge(kOne)), DriverError);
}

TEST_F(SwappedMemoryTest, ATakerWaitsForRoomAndGetsIt) {
  Held leaving = hold(kTwo);
  SwappedMemory swapped(0, kTwo, kTwo);
  swapped.announce(kOne);
  swapped.create_ahead({kOne}, 0, charge(0));
  std::atomic<bool> has_taken{false};
  std::thread taker([&] {
    check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
    const SwappedMemory::Handle handle = swapped.take(kOne);
    EXPECT_EQ(handle.memory.size_bytes(), kOne);
    has_taken = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(has_taken);
  offer(swapped, leaving);
  taker.join();
  EXPECT_TRUE(has_taken);
}

TEST_F(SwappedMemoryTest, ATakerIsToldThatTheGivingSideEnded) {
  const Held leaving = hold(kTwo);
  SwappedMemory swapped(0, kTwo, kTwo);
  swapped.announce(kOne);
  swapped.create_ahead({kOne}, 0, charge(0));
  std::thread taker([&] { EXPECT_THROW(swapped.take(kOne), StateError); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  swapped.close();
  taker.join();
}

TEST_F(SwappedMemoryTest, AHandleThatTheDriverDoesNotReleaseStaysItsOwners) {
  Held leaving = hold(kOne);
  SwappedMemory swapped(0, kOne, kOne);
  swapped.create_ahead({}, 0, charge(0));
  sim().fail("cuMemRelease", 1, CUDA_ERROR_UNKNOWN, 1);
  EXPECT_THROW(offer(swapped, leaving), DriverError);
  EXPECT_TRUE(leaving.memory.has_handle());
  EXPECT_EQ(leaving.charge.size_bytes(), kOne);
}

}  // namespace
}  // namespace ebbtide::testing
