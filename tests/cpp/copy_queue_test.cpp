// The order of steps in a copy, without a driver: the test takes the steps in an order of its own.
#include "store/copy_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"

namespace ebbtide::testing {
namespace {

using Kind = CopyStep::Kind;

constexpr size_t kPart = 4 * kKiB;
constexpr RingCut kCut = {2, 8 * kPart, 2 * kPart, kPart, 2 * kPart};

// Holds nothing, because no bytes are moved here.
class EmptyBackup final : public Backup {
 public:
  explicit EmptyBackup(bool is_direct) : is_direct_(is_direct) {}
  void write(size_t, const std::byte*, size_t) override {}
  void read(size_t, std::byte*, size_t) const override {}
  void discard(size_t, size_t) noexcept override {}
  const std::byte* memory() const noexcept override { return &byte_; }
  std::byte* view() override { return &byte_; }
  std::byte* direct() noexcept override { return is_direct_ ? &byte_ : nullptr; }
  void abandon() noexcept override { was_abandoned = true; }
  bool was_abandoned = false;

 private:
  const bool is_direct_;
  std::byte byte_{};
};

class CopyQueueTest : public ::testing::Test {
 protected:
  size_t submit(Backup& backup, size_t size_bytes) {
    const CopyRange range = {0, size_bytes};
    return queue_.submit({0, &backup, 0, std::span(&range, 1)});
  }
  std::vector<CopyStep> take_all(Kind kind) {
    std::vector<CopyStep> taken;
    for (CopyStep step = queue_.next(false); step.kind == kind; step = queue_.next(false)) taken.push_back(step);
    return taken;
  }

  CopyQueue queue_{CopyDirection::kToStore, kCut, 8};
  EmptyBackup staged_{false};
  EmptyBackup direct_{true};
};

TEST_F(CopyQueueTest, StagedPiecesTakeNoPlaceFromDirectOnes) {
  submit(staged_, 8 * kPart);  // all of the ring
  submit(direct_, kDirectPieceBytes);
  submit(direct_, kDirectPieceBytes);
  const std::vector<CopyStep> launches = take_all(Kind::kLaunch);
  ASSERT_EQ(launches.size(), 6u) << "four pieces through the ring and two without it";
  EXPECT_TRUE(launches[4].flight->piece.is_direct());
}

TEST_F(CopyQueueTest, DirectPiecesTakeNoRoomFromStagedOnes) {
  submit(direct_, 3 * kDirectPieceBytes);
  submit(staged_, 8 * kPart);
  EXPECT_EQ(take_all(Kind::kLaunch).size(), 7u);
  submit(staged_, kPart);
  EXPECT_TRUE(take_all(Kind::kLaunch).empty()) << "the ring is full";
}

TEST_F(CopyQueueTest, FourDirectPiecesAreUnderWayAtOnce) {
  const size_t job = submit(direct_, 6 * kDirectPieceBytes);
  std::vector<CopyStep> launches = take_all(Kind::kLaunch);
  ASSERT_EQ(launches.size(), 4u);
  for (size_t next = 0; next < launches.size(); ++next) {
    queue_.launched(*launches[next].flight);
    queue_.landed(*launches[next].flight);
    for (const CopyStep& more : take_all(Kind::kLaunch)) launches.push_back(more);
  }
  EXPECT_EQ(launches.size(), 6u);
  EXPECT_EQ(queue_.poll_landed(), job);
}

TEST_F(CopyQueueTest, ALaterPieceThatIsDoneGivesItsRoomBackWithTheFirst) {
  submit(staged_, 10 * kPart);
  const std::vector<CopyStep> launches = take_all(Kind::kLaunch);
  ASSERT_EQ(launches.size(), 4u);
  for (const CopyStep& step : launches) queue_.launched(*step.flight);
  for (const size_t index : {1, 2, 3}) {
    queue_.landed(*launches[index].flight);
    for (const CopyStep& part : take_all(Kind::kPart)) queue_.part_done(*part.flight);
  }
  EXPECT_EQ(queue_.next(false).kind, Kind::kNothing) << "the first is awaited, and the last has no room";
  queue_.landed(*launches[0].flight);
  const CopyStep first = queue_.next(false);
  const CopyStep second = queue_.next(false);
  ASSERT_EQ(second.kind, Kind::kPart);
  EXPECT_EQ(first.offset + kPart, second.offset);
  queue_.part_done(*second.flight);
  EXPECT_EQ(queue_.next(false).kind, Kind::kNothing);
  queue_.part_done(*first.flight);
  EXPECT_EQ(queue_.next(false).kind, Kind::kLaunch);
}

TEST_F(CopyQueueTest, OneThreadAwaitsTheBusAndTheOthersHaveTheirHandsFree) {
  submit(staged_, 4 * kPart);
  for (const CopyStep& step : take_all(Kind::kLaunch)) queue_.launched(*step.flight);
  const CopyStep awaited = queue_.next(false);
  ASSERT_EQ(awaited.kind, Kind::kAwait);
  EXPECT_EQ(queue_.next(false).kind, Kind::kNothing);
  queue_.landed(*awaited.flight);
  EXPECT_EQ(queue_.next(false).kind, Kind::kPart);
}

// Who does the steps between other work goes on with that, as long as the bus has room.
TEST_F(CopyQueueTest, DirectPiecesAreAwaitedBetweenJobsOnlyWhereTheBusIsFull) {
  for (int number = 1; number <= 4; ++number) {
    submit(direct_, kDirectPieceBytes);
    for (const CopyStep& step : take_all(Kind::kLaunch)) queue_.launched(*step.flight);
    EXPECT_EQ(queue_.next(false).kind, Kind::kNothing) << number;
  }
  submit(direct_, kDirectPieceBytes);
  const CopyStep awaited = queue_.next(false);
  ASSERT_EQ(awaited.kind, Kind::kAwait);
  queue_.landed(*awaited.flight);
  const CopyStep last = queue_.next(false);
  ASSERT_EQ(last.kind, Kind::kLaunch);
  queue_.launched(*last.flight);
  EXPECT_EQ(queue_.next(false).kind, Kind::kNothing);
  queue_.close();
  EXPECT_EQ(queue_.next(false).kind, Kind::kAwait) << "nothing else is to be done";
}

// Jobs that landed are reported at once, the end only after all threads have stopped working.
TEST_F(CopyQueueTest, AFailureIsToldWhenTheThreadsHaveEnded) {
  submit(staged_, kPart);
  queue_.threads_started();
  queue_.fail(std::make_exception_ptr(StateError("stop")));
  EXPECT_EQ(queue_.next(true).kind, Kind::kEnd);
  std::atomic<bool> is_told{false};
  std::jthread waiter([&] {
    EXPECT_EQ(queue_.wait_landed(), std::nullopt);
    is_told = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(is_told) << "one still works";
  queue_.threads_ended();
  waiter.join();
  EXPECT_TRUE(is_told);
  EXPECT_THROW(queue_.rethrow_failure(), StateError);
}

TEST_F(CopyQueueTest, OnlyDirectBackupsOnTheBusAreAbandoned) {
  EmptyBackup later(true);
  submit(staged_, kPart);
  submit(direct_, kDirectPieceBytes);
  EXPECT_FALSE(queue_.is_bus_used());
  const std::vector<CopyStep> launches = take_all(Kind::kLaunch);
  ASSERT_EQ(launches.size(), 2u);
  submit(later, kDirectPieceBytes);
  EXPECT_TRUE(queue_.is_bus_used()) << "before its arrival is known";
  queue_.fail(std::make_exception_ptr(StateError("stop")));
  queue_.abandon_direct_backups();
  EXPECT_TRUE(direct_.was_abandoned);
  EXPECT_FALSE(staged_.was_abandoned);
  EXPECT_FALSE(later.was_abandoned);
}

TEST(CopyQueueCut, OneByWhichNothingWouldMoveIsRefused) {
  const auto make = [](RingCut cut, size_t events) { CopyQueue(CopyDirection::kToStore, cut, events); };
  EXPECT_NO_THROW(make(kCut, 1));
  RingCut cut = kCut;
  cut.piece_bytes = cut.ring_bytes + 1;
  EXPECT_THROW(make(cut, 1), InvalidArgument);
  cut = {1, 6000, 6000, kPart, kPart};
  EXPECT_THROW(make(cut, 1), InvalidArgument) << "room is taken in whole pages";
  for (size_t RingCut::* field : {&RingCut::piece_bytes, &RingCut::part_bytes, &RingCut::request_bytes}) {
    cut = kCut;
    cut.*field = 0;
    EXPECT_THROW(make(cut, 1), InvalidArgument);
  }
  cut = kCut;
  cut.part_bytes = kPart + 8;
  EXPECT_THROW(make(cut, 1), InvalidArgument);
  EXPECT_THROW(make(kCut, 0), InvalidArgument);
}

}  // namespace
}  // namespace ebbtide::testing
