// The host memory of large model support: pinned slabs, and ordinary memory where nothing can be pinned.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "lms/evicted_memory.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kShared = lms::EvictedMemory::kSharedSlabBytes;
constexpr uint64_t kLarge = lms::EvictedMemory::kSmallPieceBytes + kPage;

class EvictedMemoryTest : public CoreTest {
 protected:
  HostBudget& host() { return core().budgets.host; }
  PinnedBudget& pinned() { return core().budgets.pinned; }
  std::byte* take(uint64_t size_bytes) { return memory_.take(0, size_bytes); }
  void give_back(std::byte* piece) { memory_.give_back(piece); }

  void expect_usage(uint64_t held_bytes, uint64_t used_bytes, uint64_t pinned_bytes) {
    const auto usage = memory_.usage();
    EXPECT_EQ(usage.held_bytes, held_bytes);
    EXPECT_EQ(usage.used_bytes, used_bytes);
    EXPECT_EQ(usage.pinned_bytes, pinned_bytes);
    EXPECT_EQ(host().held_bytes(), held_bytes);
    EXPECT_EQ(pinned().held_bytes(), pinned_bytes);
  }
  static uint64_t pins() { return sim().calls("cuMemHostRegister"); }

  lms::EvictedMemory memory_{core().budgets.host, core().budgets.pinned, core().capture_gate};
};

TEST_F(EvictedMemoryTest, SmallPiecesShareASlabAndLargeOnesHaveTheirOwn) {
  std::byte* const first = take(5000);
  std::byte* const second = take(1);
  expect_usage(kShared, 5120 + 256, kShared);
  EXPECT_EQ(second - first, 5120);
  std::byte* const large = take(kLarge + 1);
  expect_usage(kShared + kLarge + kPage, 5120 + 256 + kLarge + 256, kShared + kLarge + kPage);
  EXPECT_EQ(Live::now().registered_ranges, 2u);
  for (std::byte* const piece : {first, second, large})
    EXPECT_EQ(reinterpret_cast<uintptr_t>(piece) % lms::EvictedMemory::kAlignment, 0u);
  std::memset(first, 1, 5000);
  std::memset(second, 2, 1);
  std::memset(large, 3, kLarge + 1);
  EXPECT_EQ(first[4999], std::byte{1});
  for (std::byte* const piece : {first, second, large}) give_back(piece);
  expect_usage(kShared + kLarge + kPage, 0, kShared + kLarge + kPage);
  memory_.trim();
  expect_usage(0, 0, 0);
  EXPECT_EQ(Live::now().registered_ranges, 0u);
}

TEST_F(EvictedMemoryTest, WhatIsNoPieceIsRefused) {
  std::byte* const piece = take(5000);
  EXPECT_THROW(take(0), InvalidArgument);
  EXPECT_THROW(memory_.take(kDevices, 1), InvalidArgument);
  EXPECT_THROW(memory_.take(-1, 1), InvalidArgument);
  EXPECT_THROW(give_back(piece + 256), InvalidArgument);
  EXPECT_THROW(give_back(nullptr), InvalidArgument);
  give_back(piece);
  EXPECT_THROW(give_back(piece), InvalidArgument);
  expect_usage(kShared, 0, kShared);
}

TEST_F(EvictedMemoryTest, ASecondRoundPinsNothing) {
  const std::vector<uint64_t> sizes = {kLarge, 300, 5 * kMiB, kLarge + 5 * kPage, 2 * kMiB, kLarge, 7 * kMiB, 100};
  uint64_t pins_before = 0;
  for (int round = 0; round < 3; ++round) {
    if (round == 1) pins_before = pins();
    std::vector<std::byte*> pieces;
    for (const uint64_t size_bytes : sizes) pieces.push_back(take(size_bytes));
    for (const size_t index : {2, 0, 1, 7, 5, 6, 3, 4}) give_back(pieces[index]);
  }
  EXPECT_GT(pins_before, 3u);
  EXPECT_EQ(pins(), pins_before);
  expect_usage(kShared + 3 * kLarge + 5 * kPage, 0, kShared + 3 * kLarge + 5 * kPage);
}

TEST_F(EvictedMemoryTest, ATrimKeepsTheSlabsOfPieces) {
  std::byte* const small = take(100);
  std::byte* const large = take(kLarge);
  std::byte* const larger = take(2 * kLarge);
  give_back(large);
  memory_.trim();
  expect_usage(kShared + 2 * kLarge, 256 + 2 * kLarge, kShared + 2 * kLarge);
  give_back(small);
  give_back(larger);
  memory_.trim();
  expect_usage(0, 0, 0);
}

TEST_F(EvictedMemoryTest, ARefusedPieceTakesNothing) {
  host().set_limit(kShared + kLarge);
  take(100);
  std::byte* const large = take(kLarge);
  const auto before = Live::now();
  try {
    take(kShared);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StoreError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("evicted memory"), std::string::npos) << text;
    EXPECT_NE(text.find("host_limit"), std::string::npos) << text;
  }
  EXPECT_THROW(take(UINT64_MAX), StoreError);
  expect_usage(kShared + kLarge, 256 + kLarge, kShared + kLarge);
  EXPECT_EQ(Live::now(), before);
  give_back(large);
}

TEST_F(EvictedMemoryTest, FreeSlabsGoBeforeAPieceIsRefused) {
  host().set_limit(4 * kLarge);
  give_back(take(2 * kLarge));
  give_back(take(kLarge));
  expect_usage(2 * kLarge, 0, 2 * kLarge);  // the second one was cut from the first
  std::byte* const piece = take(4 * kLarge);
  expect_usage(4 * kLarge, 4 * kLarge, 4 * kLarge);
  give_back(piece);
}

TEST_F(EvictedMemoryTest, WhereASharedSlabIsTooLargeAnExactOneServes) {
  host().set_limit(3 * kPage);
  std::byte* const piece = take(kPage + 1);
  expect_usage(2 * kPage, kPage + 256, 2 * kPage);
  std::byte* const other = take(kPage - 256);
  EXPECT_EQ(other - piece, static_cast<ptrdiff_t>(kPage + 256)) << "the rest of the slab";
  take(kPage);
  expect_usage(3 * kPage, 3 * kPage, 3 * kPage);
  EXPECT_THROW(take(1), StoreError);
}

TEST_F(EvictedMemoryTest, BeforeARefusalAPieceIsCutFromTheOtherKindOfSlab) {
  host().set_limit(kLarge + kShared);
  std::byte* const large = take(kLarge);
  std::byte* const small = take(100);
  give_back(large);
  std::vector<std::byte*> pieces;
  for (int piece = 0; piece < 4; ++piece) pieces.push_back(take(8 * kMiB));  // three fit beside the small one
  expect_usage(kLarge + kShared, 256 + 4 * 8 * kMiB, kLarge + kShared);
  EXPECT_EQ(pieces.back(), large);
  for (std::byte* const piece : pieces) give_back(piece);
  std::byte* const tall = take(kLarge + kPage);  // kLarge is too small: the slab of `small` has room
  expect_usage(kLarge + kShared, 256 + kLarge + kPage, kLarge + kShared);
  give_back(tall);
  give_back(small);
}

TEST_F(EvictedMemoryTest, BeyondThePinnedLimitPiecesAreOrdinaryAndExact) {
  pinned().set_limit(kLarge);
  std::byte* const large = take(kLarge);
  std::byte* const ordinary = take(kLarge);
  std::byte* const small = take(5000);
  expect_usage(2 * kLarge + 2 * kPage, 2 * kLarge + 2 * kPage, kLarge);
  EXPECT_EQ(Live::now().registered_ranges, 1u);
  std::memset(ordinary, 1, kLarge);
  std::memset(small, 1, 5000);
  give_back(small);
  EXPECT_THROW(give_back(small), InvalidArgument);
  give_back(ordinary);
  expect_usage(kLarge, kLarge, kLarge);  // what is ordinary goes back at once
  give_back(large);
  memory_.trim();
  expect_usage(0, 0, 0);
  pinned().set_limit(2 * kPage);  // too little for a shared slab
  take(5000);
  expect_usage(2 * kPage, 5120, 2 * kPage);
}

TEST_F(EvictedMemoryTest, WhatTheDriverDoesNotPinIsOrdinary) {
  sim().fail("cuMemHostRegister", 1, kOther, 1);
  std::byte* const piece = take(kLarge + 1);
  expect_usage(kLarge + kPage, kLarge + kPage, 0);
  const uint64_t pins_before = pins();
  std::byte* const other = take(5000);
  EXPECT_EQ(pins(), pins_before) << "it is not tried again for each piece";
  expect_usage(kLarge + 3 * kPage, kLarge + 3 * kPage, 0);
  give_back(piece);
  give_back(other);
  expect_usage(0, 0, 0);
  memory_.trim();
  give_back(take(kLarge));
  expect_usage(kLarge, 0, kLarge);
}

TEST_F(EvictedMemoryTest, ASlabThatCanNotBeUnpinnedIsTriedAgain) {
  give_back(take(kLarge));
  sim().fail("cuMemHostUnregister", 1, kOther, 1);
  memory_.trim();
  EXPECT_EQ(deferred_undos::count(), 1u);
  EXPECT_EQ(Live::now().registered_ranges, 1u);
  deferred_undos::retry(true);
  EXPECT_EQ(Live::now().registered_ranges, 0u);
}

TEST_F(EvictedMemoryTest, ACaptureIsNotBroken) {
  give_back(take(kLarge));
  const Stream stream = Stream::create();
  // Known to ebbtide: nothing is pinned or unpinned.
  core().capture_gate.begin_capture();
  check(driver().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  std::byte* const kept = take(kLarge);
  std::byte* const piece = take(kLarge);
  expect_usage(2 * kLarge, 2 * kLarge, kLarge);
  give_back(kept);
  EXPECT_THROW(memory_.trim(), StateError);
  host().set_limit(3 * kLarge);
  EXPECT_THROW(take(3 * kLarge), StoreError) << "what is free can't be unpinned now";
  expect_usage(2 * kLarge, kLarge, kLarge);
  CUgraph graph = nullptr;
  check(driver().cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  check(driver().cuGraphDestroy(graph), "cuGraphDestroy");
  core().capture_gate.end_capture();
  give_back(piece);
  std::byte* const large = take(3 * kLarge);
  expect_usage(3 * kLarge, 3 * kLarge, 3 * kLarge);
  // Known to nobody, and not to be seen: it stays whole all the same.
  host().set_limit(kUnlimited);
  check(driver().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  give_back(take(kLarge));
  memory_.trim();
  expect_usage(3 * kLarge, 3 * kLarge, 3 * kLarge);
  check(driver().cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  check(driver().cuGraphDestroy(graph), "cuGraphDestroy");
  give_back(large);
}

TEST_F(EvictedMemoryTest, TheCallersContextIsRestored) {
  if (is_hip()) GTEST_SKIP() << "in HIP a thread always has a device";
  check(driver().cuCtxSetCurrent(nullptr), "cuCtxSetCurrent");
  std::byte* const piece = memory_.take(1, kLarge);
  CUcontext current = primary_context(0);
  check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  EXPECT_EQ(current, nullptr);
  expect_usage(kLarge, kLarge, kLarge);
  give_back(piece);
  memory_.trim();
  check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
}

TEST_F(EvictedMemoryTest, WhatTheDeviceMayUseForEverIsNotUsedAgain) {
  pinned().set_limit(kShared);
  std::byte* const small = take(300);
  std::byte* const neighbour = take(300);
  std::byte* const ordinary = take(kLarge);
  memory_.abandon(small + 299);
  memory_.abandon(ordinary + kLarge - 1);
  memory_.abandon(&small);  // no memory of ours
  for (std::byte* const piece : {small, neighbour, ordinary}) give_back(piece);
  EXPECT_THROW(give_back(ordinary), InvalidArgument);
  EXPECT_THROW(give_back(small), InvalidArgument);
  memory_.trim();
  expect_usage(kShared + kLarge, 512 + kLarge, kShared);
  EXPECT_NE(take(300), small);
  std::memset(ordinary, 1, kLarge);  // it is there
}

TEST_F(EvictedMemoryTest, PiecesNeverOverlapAndAllOfThemGoBack) {
  std::mt19937_64 random(5);
  struct Piece {
    std::byte* bytes;
    uint64_t size_bytes;
    int value;
  };
  std::vector<Piece> pieces;
  pinned().set_limit(64 * kMiB);
  for (int step = 0; step < 400; ++step) {
    if (random() % 2 == 0 || pieces.empty()) {
      const uint64_t size_bytes = 1 + random() % (random() % 5 == 0 ? 10 * kMiB : 100 * kKiB);
      const Piece piece = {take(size_bytes), size_bytes, static_cast<int>(random() % 256)};
      std::memset(piece.bytes, piece.value, size_bytes);
      pieces.push_back(piece);
      continue;
    }
    std::swap(pieces[random() % pieces.size()], pieces.back());
    const Piece piece = pieces.back();
    pieces.pop_back();
    const bool is_whole = std::all_of(piece.bytes, piece.bytes + piece.size_bytes,
                                      [&](std::byte byte) { return byte == static_cast<std::byte>(piece.value); });
    ASSERT_TRUE(is_whole);
    give_back(piece.bytes);
    if (step % 50 == 0) memory_.trim();
  }
  for (const Piece& piece : pieces) give_back(piece.bytes);
  memory_.trim();
  expect_usage(0, 0, 0);
}

}  // namespace
}  // namespace ebbtide::testing
