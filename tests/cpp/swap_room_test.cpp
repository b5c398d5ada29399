// Room on the device for a swap: the memory that the returning side needs beyond that of the leaving side exists before
// anything moves, whatever the sizes of the chunks.
#include "base/error.h"
#include "moves_world.h"
#include "policy/chunking.h"
#include "vmm/late_memory.h"

namespace ebbtide::testing {
namespace {

const Policy kRam = {BackupKind::kRam};

struct Sizes {
  const char* name;
  std::vector<uint64_t> out;
  std::vector<uint64_t> in;
  uint64_t difference;  // in blocks
  uint64_t shared_handle_bytes = policy::kSharedHandleBytes;
};

// The fixture gives each test the device memory that it needs beside the margin.
class SwapRoom : public MovesWorld, public ::testing::WithParamInterface<Sizes> {
 protected:
  void make() {
    sim().set_capacity(0, kGiB);
    core().rules.shared_handle_bytes = GetParam().shared_handle_bytes;
    build({{"out", kRam, 0, GetParam().out}, {"in", kRam, 0, GetParam().in}});
    pause({"in"});
  }
  std::unique_ptr<Operation> claim_swap() {
    OperationRequest request;
    request.tags.names = {"out"};
    request.resume_tags.names = {"in"};
    return Operation::claim(core(), OperationKind::kSwap, std::move(request));
  }
  // Leaves this much room beside the present memory.
  static void leave_room(uint64_t blocks) {
    sim().set_capacity(0, Live::now().device_bytes + blocks * kChunk);
    late_memory::forget();  // it is the device that is smaller: no swap waits for memory that is late
  }
  // Memory that the swap left out comes back once there is room.
  void finish() {
    EXPECT_EQ(resident_bytes("out"), 0u);
    sim().set_capacity(0, kGiB);
    resume();
    expect_bytes("back");
    free_all();
    expect_nothing_left();
  }
};

TEST_P(SwapRoom, TheDifferenceAloneIsEnough) {
  make();
  leave_room(GetParam().difference);
  swap({"out"}, {"in"});
  expect_sound("swapped");
  finish();
}

TEST_P(SwapRoom, Invariant3_LessThanTheDifferenceIsRefusedBeforeAnythingMoves) {
  if (GetParam().difference == 0) return;
  make();
  const std::vector<Place> before = places();
  leave_room(GetParam().difference - 1);
  EXPECT_THROW(claim_swap(), OutOfMemory);
  EXPECT_EQ(places(), before);
  expect_sound("refused");
  leave_room(GetParam().difference);
  swap({"out"}, {"in"});
  finish();
}

// Another process takes the free memory once the swap is claimed.
TEST_P(SwapRoom, WhatIsFreeLaterDoesNotMatter) {
  make();
  leave_room(GetParam().difference + 1);
  auto operation = claim_swap();
  sim().set_capacity(0, std::max<uint64_t>(Live::now().device_bytes, kChunk));
  operation->commit();
  operation.reset();
  finish();
}

TEST_P(SwapRoom, Invariant3_OutOfMemoryWhileItIsClaimedLeavesBothAsTheyWere) {
  make();
  leave_room(GetParam().difference);
  const size_t calls = count_calls([&] { claim_swap()->abandon(); });
  size_t refused = 0;
  for (size_t k = 1; k <= calls; ++k) {
    for (const uint64_t times : {1, 0}) {
      SCOPED_TRACE("call " + std::to_string(k));
      core().engines.trim();
      const std::vector<Place> before = places();
      sim().fail(nullptr, k, kOutOfMemory, times);
      try {
        claim_swap()->abandon();
      } catch (const Error&) {
        ++refused;
      }
      sim().clear_failures();
      give_back_caches(core());
      EXPECT_EQ(places(), before);
      expect_sound("claimed and abandoned");
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(refused, 0u);
  swap({"out"}, {"in"});
  finish();
}

INSTANTIATE_TEST_SUITE_P(Sizes, SwapRoom,
                         ::testing::Values(Sizes{"one_large_chunk", {1, 1, 1}, {4}, 1},
                                           Sizes{"chunks_across_the_difference", {2, 2}, {3, 3}, 2},
                                           Sizes{"a_piece_and_a_rest", {1, 1}, {2, 3}, 3},
                                           Sizes{"equal_sizes", {1, 1}, {1, 1, 1}, 1},
                                           Sizes{"less_comes_back", {2, 2}, {3}, 0},
                                           // Otherwise neighbours share a handle, and then sizes are seldom uneven.
                                           Sizes{"handles_of_one_chunk", {1, 1, 1}, {1, 2}, 0, 0},
                                           Sizes{"pieces_across_the_difference", {2, 2}, {3, 3}, 2, 0},
                                           Sizes{"a_rest_and_a_piece", {3, 1}, {1, 1, 3}, 1, 0}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ebbtide::testing
