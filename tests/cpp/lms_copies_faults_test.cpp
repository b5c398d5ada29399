// Copies of large model support whose driver calls fail, one after the other.
#include <string>

#include "lms_copies_world.h"
#include "sweep.h"

namespace ebbtide::testing {
namespace {

class CopiesFaults : public CopiesTest {
 protected:
  // A copy each way, as a step does them. What was begun is ended, whatever fails.
  struct Trip {
    bool has_failed = false;
    bool may_run_for_ever = false;  // and nobody knows
  };

  void end(std::unique_ptr<lms::Copy> copy, Trip& trip) {
    if (copy == nullptr) return;
    note(trip, [&] { copy->order_before(stream_.get()); });
    copy->is_done();
    note(trip, [&] { copy->wait(); });
    note(trip, [&] { copy->end(); });
  }

  template <typename Act>
  void note(Trip& trip, const Act& act) {
    try {
      act();
    } catch (const Error& error) {
      EXPECT_STRNE(error.what(), "");
      trip.has_failed = true;
      trip.may_run_for_ever |= std::string(error.what()).find("for ever") != std::string::npos;
    }
  }

  Trip travel() {
    Trip trip;
    std::unique_ptr<lms::Copy> out;
    std::unique_ptr<lms::Copy> back;
    note(trip, [&] { out = to_host(piece_, address_, kChunk, stream_.get()); });
    note(trip, [&] { back = to_device(address_ + kChunk, other_piece_, kChunk, stream_.get()); });
    end(std::move(out), trip);
    end(std::move(back), trip);
    return trip;
  }

  // Anew, with an exact slab for each piece: what is lost stays small.
  void start(bool is_first_use = true) {
    copies_.reset();
    core().budgets.pinned.set_limit(core().budgets.pinned.lost_bytes() + 2 * kChunk);
    memory_.reset();
    memory_ = std::make_unique<lms::EvictedMemory>(core().budgets.host, core().budgets.pinned, core().capture_gate);
    copies_ = std::make_unique<lms::Copies>(core().capture_gate, *memory_);
    piece_ = memory_->take(0, kChunk);
    other_piece_ = memory_->take(0, kChunk);
    std::memset(other_piece_, 9, kChunk);
    if (!is_first_use) expect_a_whole_trip();
    set(address_, 7, kChunk, stream_.get());
    sim().clear_log();
  }

  // What has ended without an error about it is not under way: nothing of it is queued.
  void expect_nothing_under_way(const Trip& trip) {
    if (!trip.may_run_for_ever) {
      std::memset(piece_, 1, kChunk);
      std::memset(reinterpret_cast<void*>(address_), 1, 2 * kChunk);
      std::memset(other_piece_, 2, kChunk);
      check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
      EXPECT_TRUE(is_all(piece_, 1, kChunk)) << "a copy ran after it was ended";
      EXPECT_TRUE(is_all_on_device(address_ + kChunk, 1, kChunk)) << "a copy ran after it was ended";
      std::memset(other_piece_, 9, kChunk);
    }
    stream_.synchronize();
  }

  void expect_a_whole_trip() {
    set(address_, 7, kChunk, stream_.get());
    const Trip trip = travel();
    EXPECT_FALSE(trip.has_failed);
    EXPECT_TRUE(is_all(piece_, 7, kChunk));
    EXPECT_TRUE(is_all_on_device(address_ + kChunk, 9, kChunk));
  }

  static bool is_refused(const std::function<std::unique_ptr<lms::Copy>()>& begin) {
    try {
      begin()->end();
      return false;
    } catch (const StateError& error) {
      EXPECT_NE(std::string(error.what()).find("could not be waited for"), std::string::npos) << error.what();
      return true;
    }
  }

  // After a copy that nobody could wait for: no other begins in its stream, and nobody gets its host memory.
  void expect_lost() {
    const bool is_out_lost = is_refused([&] { return to_host(piece_, address_, kChunk, nullptr); });
    const bool is_back_lost = is_refused([&] { return to_device(address_, other_piece_, kChunk, nullptr); });
    EXPECT_TRUE(is_out_lost || is_back_lost);
    memory_->give_back(piece_);
    memory_->give_back(other_piece_);
    EXPECT_EQ(memory_->usage().used_bytes, (is_out_lost ? kChunk : 0) + (is_back_lost ? kChunk : 0));
    memory_->trim();
    EXPECT_EQ(memory_->usage().held_bytes, memory_->usage().used_bytes);
  }

  void try_once(const CallFailure& failure, bool is_first_use) {
    start(is_first_use);
    const Live before = Live::now();
    failure.inject();
    const Trip trip = travel();
    sim().clear_failures();
    failures_ += trip.has_failed ? 1 : 0;
    losses_ += trip.may_run_for_ever ? 1 : 0;
    expect_nothing_under_way(trip);
    if (trip.may_run_for_ever) {
      expect_lost();
    } else {
      EXPECT_EQ(Live::now().queued_items, 0u);
      expect_a_whole_trip();
      EXPECT_EQ(memory_->usage().used_bytes, 2 * kChunk);
      // With one failure, none that can't be destroyed: two events of each copy and one of each stream.
      if (failure.times == 1) EXPECT_EQ(Live::now().events, before.events + (is_first_use ? 8 : 0));
    }
  }

  const CUdeviceptr address_ = alloc("lms", 2 * kChunk);
  const Stream stream_ = Stream::create();
  std::byte* piece_ = nullptr;
  std::byte* other_piece_ = nullptr;
  size_t failures_ = 0;
  size_t losses_ = 0;
};

TEST_F(CopiesFaults, EachDriverCallFailsOnceTwiceOrForGood) {
  for (const bool is_first_use : {true, false}) {
    start(is_first_use);
    const Trip whole = travel();
    ASSERT_FALSE(whole.has_failed);
    ASSERT_GT(sim().calls(nullptr), 20u);
    failures_ = losses_ = 0;
    const std::vector<CallFailure> all = failures_of(logged_calls());
    for (CallFailure failure : all) {
      SCOPED_TRACE(failure.text() + (is_first_use ? ", first use" : ", later use"));
      try_once(failure, is_first_use);
      if (failure.times == 1) {
        SCOPED_TRACE("twice");
        failure.times = 2;
        try_once(failure, is_first_use);
      }
      if (HasFailure()) return;
    }
    EXPECT_GT(failures_, all.size() / 2);
    EXPECT_GT(losses_, 5u);
  }
}

TEST_F(CopiesFaults, ACopyThatCanNotBeRecordedIsWaitedFor) {
  start();
  expect_a_whole_trip();
  set(address_, 3, kChunk, stream_.get());
  // Of a copy's three records the last one comes after it.
  sim().fail("cuEventRecord", 3, kOther, 1);
  EXPECT_THROW(to_host(piece_, address_, kChunk, stream_.get()), DriverError);
  EXPECT_TRUE(is_all(piece_, 3, kChunk)) << "the copy had begun, so it was waited for";
  sim().clear_failures();
  expect_a_whole_trip();
}

TEST_F(CopiesFaults, AWaitThatFailsLeavesTheCopyUnderWay) {
  start();
  set(address_, 3, kChunk, stream_.get());
  const auto copy = to_host(piece_, address_, kChunk, stream_.get());
  sim().fail("cuEventSynchronize", 1, kOther, 1);
  EXPECT_THROW(copy->wait(), DriverError);
  copy->wait();
  EXPECT_TRUE(is_all(piece_, 3, kChunk));
  copy->end();
  const auto another = to_host(piece_, address_, kChunk, stream_.get());
  sim().fail("cuEventSynchronize", 1, kOther, 1);
  another->end();  // the stream was waited for
  sim().fail("cuEventQuery", 1, kOther, 1);
  const auto polled = to_host(piece_, address_, kChunk, stream_.get());
  EXPECT_FALSE(polled->is_done());
  polled->end();
}

TEST_F(CopiesFaults, WhatNobodyCanWaitForIsNeverUsedAgain) {
  start();
  const auto copy = to_host(piece_, address_, kChunk, stream_.get());
  const auto earlier = to_host(other_piece_, address_, kChunk, stream_.get());
  sim().fail("cuEventSynchronize", 1, kOther, 1);
  sim().fail("cuStreamSynchronize", 1, kOther, 1);
  EXPECT_THROW(copy->end(), DriverError);
  sim().clear_failures();
  earlier->end();  // can be waited for, and is
  EXPECT_TRUE(is_refused([&] { return to_host(other_piece_, address_, kChunk, stream_.get()); }));
  to_device(address_, other_piece_, kChunk, stream_.get())->end();  // the other direction is none of its business
  memory_->give_back(piece_);
  memory_->give_back(other_piece_);
  EXPECT_EQ(memory_->take(0, kChunk), other_piece_);
  memory_->give_back(other_piece_);
  memory_->trim();
  EXPECT_EQ(memory_->usage().held_bytes, kChunk);
  EXPECT_EQ(memory_->usage().used_bytes, kChunk);
  // Even its owner leaves it where it is.
  copies_.reset();
  memory_.reset();
  EXPECT_EQ(Live::now().registered_ranges, 1u);
  EXPECT_EQ(core().budgets.pinned.held_bytes(), kChunk);
  EXPECT_EQ(core().budgets.pinned.lost_bytes(), kChunk);
  std::memset(piece_, 1, kChunk);
}

TEST_F(CopiesFaults, TheEndOfTheDriverEndsItsCopies) {
  start();
  constexpr int kDeinitialized = 4;
  const auto copy = to_host(piece_, address_, kChunk, nullptr);
  sim().fail("cuEventSynchronize", 1, kDeinitialized, 1);
  copy->end();
  sim().clear_failures();
  stream_.synchronize();
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

TEST_F(CopiesFaults, AFaultOfTheDeviceReachesWhoWaits) {
  start();
  const auto copy = to_host(piece_, address_, kChunk, nullptr);
  constexpr int kIllegalAddress = 700;
  sim().fail("cuEventSynchronize", 1, kIllegalAddress, 0);
  sim().fail("cuStreamSynchronize", 1, kIllegalAddress, 0);
  EXPECT_THROW(copy->wait(), DriverError);
  EXPECT_FALSE(copy->is_done()) << "a poll runs one item";
  try {
    copy->end();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code, kIllegalAddress);
    EXPECT_EQ(error.call, "cuStreamSynchronize");
  }
  sim().clear_failures();
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

}  // namespace
}  // namespace ebbtide::testing
