// Poison: memory whose content was dropped comes back as a pattern, whichever way it was dropped and comes back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "core/operation/pending.h"
#include "driver/device_kernels.h"
#include "moves_faults.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

constexpr unsigned char kByte = 0xEB;

bool is_poison(CUdeviceptr address, size_t size_bytes) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(address);
  return std::all_of(bytes, bytes + size_bytes, [](unsigned char byte) { return byte == kByte; });
}

class Poison : public CoreTest {
 protected:
  Poison() { core().rules.must_poison = true; }
  Report run(OperationKind kind, OperationRequest request) {
    return Operation::claim(core(), kind, std::move(request))->commit().front();
  }
  static OperationRequest at(const std::string& tag, const std::vector<CUdeviceptr>& addresses) {
    OperationRequest request;
    request.tags.names = {tag};
    request.tags.addresses = addresses;
    return request;
  }
};

TEST_F(Poison, WhatHadNoBackupAndNothingElse) {
  const CUdeviceptr cache = alloc_chunks("kv", BackupKind::kNone, 0, {kChunk, 2 * kChunk});
  const CUdeviceptr weights = alloc("w", 2 * kChunk);
  EXPECT_TRUE(is_zero(cache, 3 * kChunk)) << "new memory is zeros";
  fill(cache, 3 * kChunk, 1);
  fill(weights, kChunk, 2);
  pause();
  resume();
  EXPECT_TRUE(is_poison(cache, 3 * kChunk));
  EXPECT_TRUE(holds(weights, kChunk, 2));
  EXPECT_TRUE(is_zero(weights + kChunk, kChunk)) << "zeros that were stored are zeros";
  core().rules.must_poison = false;
  pause();
  resume();
  EXPECT_TRUE(is_zero(cache, 3 * kChunk));
}

TEST_F(Poison, ABackupRefusedThisOnce) {
  const CUdeviceptr address =
      allocate(core(), core().registry.tag("w"), {.backup = BackupKind::kRam, .retain = true}, 0, 2 * kChunk);
  fill(address, 2 * kChunk, 1);
  pause();
  resume();
  pause({}, BackupKind::kNone);
  resume();
  EXPECT_TRUE(is_poison(address, 2 * kChunk));
  pause();
  resume();
  EXPECT_TRUE(is_poison(address, 2 * kChunk)) << "and that is content like any other";
}

TEST_F(Poison, UnusedBlocksSkippedByAPause) {
  const CUdeviceptr address = alloc("w", 5 * kChunk);
  fill(address, 5 * kChunk, 1);
  OperationRequest request;
  request.unused = AddressRanges({{address + kChunk, 2 * kChunk}, {address + 4 * kChunk, kChunk}});
  request.unused_as_of = core().registry.leases.newest();
  EXPECT_EQ(run(OperationKind::kPause, request).totals().unused, 3 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, kChunk, 1));
  EXPECT_TRUE(is_poison(address + kChunk, 2 * kChunk));
  EXPECT_TRUE(is_poison(address + 4 * kChunk, kChunk));
  fill(address, 5 * kChunk, 2);
  pause();
  run(OperationKind::kResume, request);
  EXPECT_TRUE(holds(address, kChunk, 2));
  EXPECT_TRUE(is_poison(address + kChunk, 2 * kChunk)) << "what died while it was away";
}

// Without the kernels, blocks of one value can't be found, and unused ones still are.
TEST_F(Poison, UnusedBlocksWithoutKernels) {
  DeviceKernels::forget_all();
  sim().fail("cuModuleLoadData", 1, CUDA_ERROR_NOT_SUPPORTED, 0);
  const CUdeviceptr address = alloc("w", 2 * kChunk);
  fill(address, 2 * kChunk, 1);
  OperationRequest request;
  request.unused = AddressRanges({{address + kChunk, kChunk}});
  request.unused_as_of = core().registry.leases.newest();
  run(OperationKind::kPause, request);
  resume();
  EXPECT_TRUE(holds(address, kChunk, 1));
  EXPECT_TRUE(is_poison(address + kChunk, kChunk));
  sim().clear_failures();
  DeviceKernels::forget_all();
}

TEST_F(Poison, ZerosAndPoisonAndOtherValuesSideBySide) {
  const CUdeviceptr address = alloc("w", 6 * kChunk);
  auto* const bytes = reinterpret_cast<unsigned char*>(address);
  fill(address, kChunk, 1);
  std::memset(bytes + 1 * kChunk, 0, kChunk);
  std::memset(bytes + 2 * kChunk, 7, kChunk);
  std::memset(bytes + 3 * kChunk, kByte, kChunk);  // the program's own
  OperationRequest request;
  request.unused = AddressRanges({{address + 4 * kChunk, kChunk}});
  request.unused_as_of = core().registry.leases.newest();
  std::memset(bytes + 5 * kChunk, 0, kChunk);
  run(OperationKind::kPause, request);
  // Memory of another tag, full of other bytes, changes hands.
  const CUdeviceptr other = alloc_chunks("other", BackupKind::kNone, 0, {6 * kChunk});
  fill(other, 6 * kChunk, 3);
  OperationRequest swapped;
  swapped.tags.names = {"other"};
  swapped.resume_tags.names = {"w"};
  run(OperationKind::kSwap, swapped);
  EXPECT_TRUE(holds(address, kChunk, 1));
  EXPECT_TRUE(is_zero(address + kChunk, kChunk));
  EXPECT_EQ(bytes[2 * kChunk], 7);
  EXPECT_EQ(bytes[3 * kChunk - 1], 7);
  EXPECT_TRUE(is_poison(address + 3 * kChunk, 2 * kChunk));
  EXPECT_TRUE(is_zero(address + 5 * kChunk, kChunk));
  swapped.tags.names = {"w"};
  swapped.resume_tags.names = {"other"};
  run(OperationKind::kSwap, swapped);
  EXPECT_TRUE(is_poison(other, 6 * kChunk)) << "Invariant 2: no bytes of the other tag";
}

TEST_F(Poison, InTheBackground) {
  const CUdeviceptr cache = alloc("kv", 2 * kChunk, BackupKind::kNone);
  const CUdeviceptr weights = alloc("w", 3 * kChunk);
  fill(cache, 2 * kChunk, 1);
  fill(weights, 3 * kChunk, 2);
  OperationRequest request;
  request.unused = AddressRanges({{weights + kChunk, kChunk}});
  request.unused_as_of = core().registry.leases.newest();
  run(OperationKind::kPause, request);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  pending->wait();
  EXPECT_TRUE(is_poison(cache, 2 * kChunk));
  EXPECT_TRUE(holds(weights, kChunk, 2));
  EXPECT_TRUE(is_poison(weights + kChunk, kChunk));
  pause();
  PendingResume::start(claim(OperationKind::kResume, {"kv"}))->wait();
  EXPECT_TRUE(is_poison(cache, 2 * kChunk)) << "where there is nothing to copy";
}

TEST_F(Poison, TrimmedMemoryThatIsNamed) {
  const CUdeviceptr idle = alloc("w", 2 * kChunk);
  const CUdeviceptr kept = alloc("w", kChunk);
  fill(idle, 2 * kChunk, 1);
  fill(kept, kChunk, 2);
  run(OperationKind::kTrim, at("w", {idle}));
  run(OperationKind::kResume, at("w", {idle}));
  EXPECT_TRUE(is_poison(idle, 2 * kChunk));
  EXPECT_TRUE(holds(kept, kChunk, 2));
}

class PoisonOnTheHost : public OverflowWorld {
 protected:
  PoisonOnTheHost() { core().rules.must_poison = true; }
};

TEST_F(PoisonOnTheHost, WhatLayInHostMemory) {
  const size_t item = spill("kv", kSplitNone, kChunk, 2 * kChunk);
  const CUdeviceptr address = items_[item].address;
  core().budgets.device.set_limit(kChunk);  // it comes back where it was
  pause();
  resume();
  EXPECT_EQ(host_bytes(item), 2 * kChunk);
  EXPECT_TRUE(is_poison(address, 3 * kChunk));
  core().budgets.device.set_limit(kUnlimited);
}

// Bytes that are whole in memory that could not be mapped again were not dropped.
class PoisonAndDetachedBytes : public OverflowWorld {};

TEST_F(PoisonAndDetachedBytes, AreKept) {
  core().rules.must_poison = true;
  const size_t item = make("kv", {BackupKind::kNone}, {1});
  const CUdeviceptr address = items_[item].address;
  sim().fail("cuMemMap", 2, 999, 0);
  EXPECT_THROW(demote(), DriverError);
  sim().clear_failures();
  if (!core().registry.find(address)->chunks.front().is_detached.load()) GTEST_FAIL() << "the chunk is not detached";
  resume();
  expect_resident("after the resume");
  EXPECT_FALSE(is_poison(address, kChunk));
}

class PoisonFaults : public MovesFaults {
 protected:
  PoisonFaults() { core().rules.must_poison = true; }
  const std::vector<ItemSpec> specs_ = {{"w", kRetained, 0, {1, 2}}, {"n", kNone, 0, {1}}, {"n", kNone, 1, {1}}};
  const Act paused_before_ = [this] {
    items_[0].is_unused[1] = true;
    pause_but_unused();
  };
};

TEST_F(PoisonFaults, Invariant3_AResume) {
  const Act resume_all = [&] { resume(); };
  sweep_all({specs_, paused_before_, resume_all, {resume_all, [&] { pause(); }}});
}

TEST_F(PoisonFaults, Invariant3_AResumeInTheBackground) {
  const Act wait_for_it = [&] { resume_pending(); };
  sweep_all({specs_, paused_before_, wait_for_it, {[&] { resume(); }, [&] { pause(); }, wait_for_it}});
}

TEST_F(SwapFaults, Invariant3_WithPoison) {
  core().rules.must_poison = true;
  sweep_swap({{"out", kNone, 0, {1, 1}}, {"in", kNone, 0, {1, 1}}, {"in", kRam, 0, {1}}}, {"out"}, {"in"}, kUnlimited);
}

}  // namespace
}  // namespace ebbtide::testing
