// A pause that hands its memory to a resume of another process. Here one process is both, with a thread for each.
#include <atomic>
#include <thread>

#include "base/error.h"
#include "share/incoming.h"
#include "share/outgoing.h"
#include "share_fixture.h"

namespace ebbtide::testing {
namespace {

class HandOverTest : public ShareTest {
 protected:
  // Of chunks of 2 GiB at most, so that each of these is one handle.
  CUdeviceptr make_filled(const std::string& tag, uint64_t size_bytes, const Policy& policy = kExportable) {
    const CUdeviceptr address = allocate(core(), core().registry.tag(tag), policy, 0, size_bytes);
    write(address, size_bytes);
    return address;
  }
  uint64_t device_bytes(const std::string& tag) { return resident_bytes(tag); }

  // What came of the two sides. An error of either is its message.
  struct Outcome {
    std::string out, in;
    uint64_t handles = 0, released_bytes = 0;
  };
  // "out" goes, "in" comes back. stops_after: the giving side ends after so many handles, as if its process had died.
  Outcome hand_over(int stops_after = INT_MAX, bool must_clear = true) {
    Outcome outcome;
    Reception reception(core(), find_leaving(core(), {.names = {"out"}, .addresses = {}, .only = nullptr}), must_clear);
    std::multiset<uint64_t> wanted;
    std::atomic<bool> is_ready{false}, has_failed{false};
    std::thread taker([&] {
      try {
        OperationRequest request;
        request.tags.names = {"in"};
        resume_from(core(), std::move(request), reception, [&](int device, uint64_t size_bytes) {
          if (device >= 0) wanted.insert(size_bytes);
          is_ready = device < 0;
          return true;
        });
      } catch (const std::exception& error) {
        outcome.in = error.what();
        has_failed = true;
      }
    });
    while (!is_ready && !has_failed) std::this_thread::yield();
    const Receiver receiver = {.wants =
                                   [&](int, uint64_t size_bytes) {
                                     const auto found = wanted.find(size_bytes);
                                     if (found == wanted.end()) return false;
                                     wanted.erase(found);
                                     return true;
                                   },
                               .give =
                                   [&](int device, uint64_t size_bytes, int file) {
                                     if (static_cast<int>(outcome.handles) >= stops_after) return false;
                                     ++outcome.handles;
                                     reception.receive(device, size_bytes, Descriptor::copy_of(file));
                                     return true;
                                   },
                               .note_released =
                                   [&](int device, uint64_t size_bytes) {
                                     outcome.released_bytes += size_bytes;
                                     if (stops_after == INT_MAX) reception.note_released(device, size_bytes);
                                   }};
    if (!has_failed) {
      try {
        OperationRequest request;
        request.tags.names = {"out"};
        ebbtide::hand_over(core(), std::move(request), receiver);
      } catch (const std::exception& error) {
        outcome.out = error.what();
      }
    }
    reception.end();
    taker.join();
    return outcome;
  }
  uint64_t creations() {
    const auto names = logged_calls();
    return static_cast<uint64_t>(std::count(names.begin(), names.end(), "cuMemCreate"));
  }
};

TEST_F(HandOverTest, HandlesOfWantedSizesChangeHands) {
  std::vector<CUdeviceptr> leaving, returning;
  for (int index = 0; index < 4; ++index) returning.push_back(make_filled("in", 2 * kChunk));
  pause({"in"});
  for (int index = 0; index < 4; ++index) leaving.push_back(make_filled("out", 2 * kChunk));
  sim().set_capacity(0, 11 * kChunk);  // less than the margin
  sim().clear_log();
  const Outcome outcome = hand_over();
  EXPECT_EQ(outcome.in + outcome.out, "");
  EXPECT_EQ(outcome.handles, 3u);
  EXPECT_EQ(outcome.released_bytes, 2 * kChunk);
  EXPECT_EQ(creations(), 2u) << "one of the margin, in place of one that was released, and one that found no room";
  expect_whole(returning);
  EXPECT_EQ(device_bytes("out"), 0u);
  // And back, with memory that was imported once.
  pause({"in"});
  resume({"out"});
  expect_whole(leaving);
}

TEST_F(HandOverTest, MemoryThatCameFromAnotherProcessGoesOn) {
  const CUdeviceptr first = make_filled("in", 4 * kChunk);
  pause({"in"});
  const CUdeviceptr second = make_filled("out", 4 * kChunk);
  EXPECT_EQ(hand_over().in, "");
  const Descriptor file = core().registry.find(first)->chunks.front().backing->memory.export_file();
  EXPECT_TRUE(bool(file));
  expect_whole({first});
  resume({"out"});
  expect_whole({second});
}

TEST_F(HandOverTest, OtherSizesAreReleasedAndMadeAnew) {
  const std::vector<CUdeviceptr> returning = {make_filled("in", 6 * kChunk), make_filled("in", 3 * kChunk)};
  pause({"in"});
  const std::vector<CUdeviceptr> leaving = {make_filled("out", 5 * kChunk), make_filled("out", 4 * kChunk)};
  sim().set_capacity(0, 16 * kChunk);
  const Outcome outcome = hand_over();
  EXPECT_EQ(outcome.in + outcome.out, "");
  EXPECT_EQ(outcome.handles, 0u);
  EXPECT_EQ(outcome.released_bytes, 9 * kChunk);
  expect_whole(returning);
  pause({"in"});
  resume({"out"});
  expect_whole(leaving);
}

TEST_F(HandOverTest, MemoryThatIsNotExportableIsReleased) {
  const CUdeviceptr returning = make_filled("in", 4 * kChunk, {BackupKind::kRam});
  pause({"in"});
  make_filled("out", 4 * kChunk, {BackupKind::kRam});
  const Outcome outcome = hand_over();
  EXPECT_EQ(outcome.in + outcome.out, "");
  EXPECT_EQ(outcome.released_bytes, 4 * kChunk);
  expect_whole({returning});
}

// Invariant 2: nothing shows what the other process had.
TEST_F(HandOverTest, Invariant2_WhatHadNoBackupIsCleared) {
  const Policy dropped{.backup = BackupKind::kNone, .is_exportable = true};
  const CUdeviceptr returning = make_filled("in", 4 * kChunk, dropped);
  pause({"in"});
  make_filled("out", 4 * kChunk);
  sim().set_capacity(0, 5 * kChunk);
  const Outcome outcome = hand_over();
  EXPECT_EQ(outcome.in + outcome.out, "");
  EXPECT_EQ(outcome.handles, 1u);
  EXPECT_TRUE(is_zero(returning, 4 * kChunk));
}

TEST_F(HandOverTest, WhatHadNoBackupStaysWhereBothSidesSaySo) {
  const Policy dropped{.backup = BackupKind::kNone, .is_exportable = true};
  for (const bool taker_clears : {false, true}) {
    for (const bool giver_clears : {false, true}) {
      core().rules.clears_handed = taker_clears;
      const CUdeviceptr returning = make_filled("in", 4 * kChunk, dropped);
      pause({"in"});
      const CUdeviceptr leaving = make_filled("out", 4 * kChunk);
      sim().set_capacity(0, 5 * kChunk);
      const Outcome outcome = hand_over(INT_MAX, giver_clears);
      EXPECT_EQ(outcome.in + outcome.out, "");
      EXPECT_EQ(is_zero(returning, 4 * kChunk), taker_clears || giver_clears);
      deallocate(core(), returning);
      deallocate(core(), leaving);
    }
  }
}

TEST_F(HandOverTest, ZerosThatHaveABackupAreWrittenInAnyCase) {
  core().rules.clears_handed = false;
  const CUdeviceptr returning = allocate(core(), core().registry.tag("in"), kExportable, 0, 4 * kChunk);
  pause({"in"});
  make_filled("out", 4 * kChunk);
  sim().set_capacity(0, 5 * kChunk);
  const Outcome outcome = hand_over(INT_MAX, false);
  EXPECT_EQ(outcome.in + outcome.out, "");
  EXPECT_EQ(outcome.handles, 1u);
  EXPECT_TRUE(is_zero(returning, 4 * kChunk));
}

TEST_F(HandOverTest, ASmallerSideTakesWhatItWantsAndALargerOneCreatesTheRest) {
  const std::vector<CUdeviceptr> returning = {make_filled("in", 4 * kChunk), make_filled("in", 2 * kChunk)};
  pause({"in"});
  make_filled("out", 4 * kChunk);
  EXPECT_EQ(hand_over().in, "");
  expect_whole(returning);
  pause({"in"});
  resume({"out"});
}

TEST_F(HandOverTest, Invariant7_ALimitHoldsBeforeAnythingMoves) {
  make_filled("in", 4 * kChunk);
  pause({"in"});
  const CUdeviceptr leaving = make_filled("out", 4 * kChunk);
  core().budgets.device.set_limit(2 * kChunk);
  const Outcome outcome = hand_over();
  EXPECT_NE(outcome.in, "");
  EXPECT_EQ(outcome.handles, 0u);
  expect_whole({leaving});
  core().budgets.device.set_limit(kUnlimited);
}

TEST_F(HandOverTest, Invariant3_AGiverThatDiesMidwayLosesNothingOfTheTaker) {
  std::vector<CUdeviceptr> returning;
  for (int index = 0; index < 6; ++index) returning.push_back(make_filled("in", kChunk));
  pause({"in"});
  for (int index = 0; index < 6; ++index) make_filled("out", kChunk);
  sim().set_capacity(0, 7 * kChunk);
  const Outcome outcome = hand_over(2);
  EXPECT_NE(outcome.in, "");
  EXPECT_EQ(device_bytes("out"), 0u) << "a pause all the same";
  resume({"in"});
  expect_whole(returning);
}

TEST_F(HandOverTest, AGiverThatIsRefusedGivesNothing) {
  make_filled("in", 4 * kChunk);
  pause({"in"});
  const CUdeviceptr leaving = make_filled("out", 4 * kChunk);
  const LeaseInfo lease = open_lease(core(), "out", "the test");
  const Outcome outcome = hand_over();
  EXPECT_NE(outcome.out, "");
  EXPECT_EQ(outcome.handles, 0u);
  core().registry.leases.close(lease.id);
  expect_whole({leaving});
  resume({"in"});
}

// Whichever call of either side fails: both tags are whole afterwards, and nothing is left.
TEST_F(HandOverTest, Invariant3_EachDriverCallFails) {
  std::vector<CUdeviceptr> all;
  sweep(
      [&] {
        all = {make_filled("in", 3 * kChunk), make_filled("in", 2 * kChunk)};
        pause({"in"});
        all.push_back(make_filled("out", 3 * kChunk));
        all.push_back(make_filled("out", 4 * kChunk));
        sim().set_capacity(0, 8 * kChunk);  // a margin of one chunk: the rest must change hands
        core().engines.trim();
      },
      [&] { hand_over(); },
      [&] {
        sim().set_capacity(0, 64 * kChunk);
        pause();
        resume();
        expect_whole(all);
        free_all(all);
        give_back_caches(core());
        const Live live = Live::now();
        EXPECT_EQ(live.handles + live.mappings + live.device_bytes, 0u) << live;
      });
}

}  // namespace
}  // namespace ebbtide::testing
