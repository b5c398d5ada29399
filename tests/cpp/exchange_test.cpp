// What a swap's two sides hand each other: which handles change owners, which are made anew, and how much there is at any moment.
#include "core/memory/exchange.h"

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

class ExchangeTest : public CoreTest {
 protected:
  ExchangeTest() { check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent"); }
  Held hold(uint64_t size_bytes) {
    return {saver().device_budget.claim(0, size_bytes), PhysicalMemory::create_on_device(size_bytes, 0)};
  }
  static void offer(Exchange& exchange, Held& held) { exchange.offer(held.memory, held.charge); }
  DeviceCharge charge(uint64_t size_bytes) { return saver().device_budget.claim(0, size_bytes); }
  static uint64_t created() { return sim().calls("cuMemCreate"); }
  static uint64_t live_bytes() { return Live::now().device_bytes; }
  uint64_t held_bytes() { return saver().device_budget.held_bytes(0); }
};

TEST_F(ExchangeTest, AHandleGoesToWhoWantsItsSize) {
  Held leaving = hold(kOne);
  const auto handle = leaving.memory.handle();
  Exchange exchange(0, kOne, kOne);
  exchange.announce(kOne);
  exchange.create_ahead({kOne}, 0, charge(0));
  const uint64_t before = created();
  offer(exchange, leaving);
  EXPECT_FALSE(leaving.memory.has_handle());
  Exchange::Piece piece = exchange.take(kOne);
  EXPECT_EQ(piece.memory.handle(), handle);
  EXPECT_FALSE(piece.is_fresh) << "it holds what its last owner left there";
  EXPECT_EQ(piece.charge.size_bytes(), kOne);
  EXPECT_EQ(created(), before);
  EXPECT_EQ(held_bytes(), kOne);
}

// Several of one size are wanted: the second finds a taker as well.
TEST_F(ExchangeTest, AsManyHandlesAreHandedOverAsWereAnnounced) {
  std::vector<Held> leaving;
  for (int count = 0; count < 3; ++count) leaving.push_back(hold(kOne));
  Exchange exchange(0, 3 * kOne, 3 * kOne);
  exchange.announce(kOne);
  exchange.announce(kOne);
  exchange.create_ahead({kOne, kOne}, 0, charge(0));
  for (Held& each : leaving) offer(exchange, each);
  EXPECT_EQ(live_bytes(), 2 * kOne) << "for the third there is no taker";
  const uint64_t before = created();
  EXPECT_FALSE(exchange.take(kOne).is_fresh);
  EXPECT_FALSE(exchange.take(kOne).is_fresh);
  EXPECT_EQ(created(), before);
}

TEST_F(ExchangeTest, WhatNobodyWantsIsMadeAnewInTheSizesThatAreWanted) {
  Held one = hold(kOne);
  Held other = hold(kOne);
  Exchange exchange(0, kTwo, kTwo);
  exchange.announce(kTwo);
  exchange.create_ahead({kTwo}, 0, charge(0));
  offer(exchange, one);
  EXPECT_EQ(live_bytes(), kOne) << "released";
  offer(exchange, other);
  const Exchange::Piece piece = exchange.take(kTwo);
  EXPECT_TRUE(piece.is_fresh);
  EXPECT_EQ(piece.memory.size_bytes(), kTwo);
  EXPECT_EQ(piece.charge.size_bytes(), kTwo);
  EXPECT_EQ(live_bytes(), kTwo);
  EXPECT_EQ(held_bytes(), kTwo);
}

TEST_F(ExchangeTest, WhatTheLimitAllowsIsMadeAheadAndNoMore) {
  Held leaving = hold(kTwo);
  Exchange exchange(0, kTwo, kTwo + kOne);
  for (int count = 0; count < 3; ++count) exchange.announce(kOne);
  exchange.create_ahead({kOne, kOne, kOne}, kOne, charge(kOne));
  EXPECT_EQ(live_bytes(), kTwo + kOne);
  const Exchange::Piece first = exchange.take(kOne);
  EXPECT_TRUE(first.is_fresh);
  EXPECT_EQ(live_bytes(), kTwo + kOne);
  offer(exchange, leaving);
  EXPECT_EQ(live_bytes(), kOne);
  const Exchange::Piece second = exchange.take(kOne);
  const Exchange::Piece third = exchange.take(kOne);
  EXPECT_EQ(live_bytes(), 3 * kOne);
  EXPECT_EQ(held_bytes(), 3 * kOne);
}

// What was made ahead has its taker: a handle of the same size that is offered later goes to the system.
TEST_F(ExchangeTest, APieceThatWasMadeAheadIsNotWantedTwice) {
  Held leaving = hold(kOne);
  Exchange exchange(0, kOne, kTwo);
  exchange.announce(kOne);
  exchange.create_ahead({kOne}, kOne, charge(kOne));
  EXPECT_EQ(live_bytes(), kTwo);
  offer(exchange, leaving);
  EXPECT_EQ(live_bytes(), kOne);
  EXPECT_TRUE(exchange.take(kOne).is_fresh);
}

TEST_F(ExchangeTest, ThePlaceholderKeepsWhatNoWholePieceFitsInto) {
  Held leaving = hold(kOne);
  Exchange exchange(0, kOne, kTwo);
  exchange.announce(kTwo);
  exchange.create_ahead({kTwo}, kOne, charge(kOne));
  EXPECT_EQ(live_bytes(), kTwo) << "the difference is held by nobody's piece";
  sim().set_capacity(0, kTwo);
  offer(exchange, leaving);
  EXPECT_EQ(live_bytes(), kOne);
  const Exchange::Piece piece = exchange.take(kTwo);
  EXPECT_EQ(piece.memory.size_bytes(), kTwo);
  EXPECT_EQ(live_bytes(), kTwo) << "the placeholder went before";
}

// The margin is not there: the limit is lowered, and the required part is there all the same.
TEST_F(ExchangeTest, WhatCanNotBeHadBeyondTheRequiredBytesIsDoneWithout) {
  Held leaving = hold(kTwo);
  Exchange exchange(0, kTwo, kTwo + kTwo);
  exchange.announce(kOne);
  exchange.announce(kOne);
  sim().set_capacity(0, kTwo + kOne);
  exchange.create_ahead({kOne, kOne}, kOne, charge(kTwo));
  EXPECT_EQ(live_bytes(), kTwo + kOne);
  const Exchange::Piece first = exchange.take(kOne);
  offer(exchange, leaving);
  const Exchange::Piece second = exchange.take(kOne);
  EXPECT_EQ(live_bytes(), kTwo);
}

TEST_F(ExchangeTest, WhatIsRequiredAndNotThereIsAnError) {
  const Held leaving = hold(kOne);
  sim().set_capacity(0, kOne);
  Exchange exchange(0, kOne, kTwo);
  exchange.announce(kOne);
  EXPECT_THROW(exchange.create_ahead({kOne}, kOne, charge(kOne)), DriverError);
  Exchange other(0, kOne, kTwo);
  sim().fail("cuMemCreate", 1, CUDA_ERROR_UNKNOWN, 1);
  other.announce(kOne);
  EXPECT_THROW(other.create_ahead({kOne}, kOne, charge(kOne)), DriverError);
}

TEST_F(ExchangeTest, ATakerWaitsForRoomAndGetsIt) {
  Held leaving = hold(kTwo);
  Exchange exchange(0, kTwo, kTwo);
  exchange.announce(kOne);
  exchange.create_ahead({kOne}, 0, charge(0));
  std::atomic<bool> has_taken{false};
  std::thread taker([&] {
    check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
    const Exchange::Piece piece = exchange.take(kOne);
    EXPECT_EQ(piece.memory.size_bytes(), kOne);
    has_taken = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(has_taken);
  offer(exchange, leaving);
  taker.join();
  EXPECT_TRUE(has_taken);
}

TEST_F(ExchangeTest, ATakerIsToldThatTheGivingSideEnded) {
  const Held leaving = hold(kTwo);
  Exchange exchange(0, kTwo, kTwo);
  exchange.announce(kOne);
  exchange.create_ahead({kOne}, 0, charge(0));
  std::thread taker([&] { EXPECT_THROW(exchange.take(kOne), StateError); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  exchange.close();
  taker.join();
}

TEST_F(ExchangeTest, AHandleThatTheDriverDoesNotReleaseStaysItsOwners) {
  Held leaving = hold(kOne);
  Exchange exchange(0, kOne, kOne);
  exchange.create_ahead({}, 0, charge(0));
  sim().fail("cuMemRelease", 1, CUDA_ERROR_UNKNOWN, 1);
  EXPECT_THROW(offer(exchange, leaving), DriverError);
  EXPECT_TRUE(leaving.memory.has_handle());
  EXPECT_EQ(leaving.charge.size_bytes(), kOne);
}

}  // namespace
}  // namespace ebbtide::testing
