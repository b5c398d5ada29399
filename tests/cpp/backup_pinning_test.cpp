// Small backups in RAM that are kept: pinned where they lie, at the second pause.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "core/operation/backup_view.h"
#include "core_fixture.h"
#include "policy/copy_plan.h"
#include "policy/pinning.h"

namespace ebbtide::testing {
namespace {

class BackupPinning : public CoreTest {
 protected:
  BackupPinning() : address_(alloc_retained(kChunks * kChunk)) { fill(address_, kSize, 1); }
  static constexpr size_t kChunks = 4;
  static constexpr uint64_t kSize = kChunks * kChunk;

  CUdeviceptr alloc_retained(uint64_t size_bytes) {
    return allocate(core(), core().registry.tag("w"), {.backup = BackupKind::kRam, .retain = true}, 0, size_bytes);
  }
  std::shared_ptr<BackupRecord> backup() { return core().registry.find(address_)->stored; }
  bool is_pinned() {
    const auto stored = backup();
    return stored != nullptr && stored->is_pinned();
  }
  // The rings of the engines are pinned, too.
  uint64_t pinned_bytes_of_backups() {
    core().engines.trim();
    return core().budgets.pinned.held_bytes();
  }
  uint64_t host_bytes_of_backups() {
    core().engines.trim();
    return core().budgets.host.held_bytes();
  }
  void cycle(uint64_t seed) {
    pause();
    resume();
    EXPECT_TRUE(holds(address_, kSize, seed));
  }
  void cycle_with(uint64_t seed) {
    fill(address_, kChunk, seed);
    pause();
    resume();
    EXPECT_TRUE(holds(address_, kChunk, seed));
  }
  void resume_after_giving_back() {
    pause();
    resume_without_retaining();
  }
  void resume_without_retaining() {
    OperationRequest request;
    request.retain = false;
    Operation::claim(core(), OperationKind::kResume, std::move(request))->commit();
  }

  const CUdeviceptr address_;
};

TEST_F(BackupPinning, AtTheSecondPauseAndUntilTheBackupGoes) {
  cycle(1);
  EXPECT_FALSE(is_pinned()) << "nobody knows that it will leave again";
  EXPECT_EQ(pinned_bytes_of_backups(), 0u);
  for (uint64_t seed = 2; seed < 6; ++seed) {
    fill(address_, kSize, seed);
    cycle(seed);
    EXPECT_TRUE(is_pinned());
    EXPECT_EQ(backup()->kind, BackupKind::kRam);
    EXPECT_EQ(pinned_bytes_of_backups(), kSize);
    EXPECT_EQ(host_bytes_of_backups(), kSize) << "the same memory";
  }
  cycle(5);  // copied once more, since a change was expected
  EXPECT_EQ(pause().totals().clean, kSize);
  resume_without_retaining();
  EXPECT_TRUE(holds(address_, kSize, 5));
  EXPECT_EQ(backup(), nullptr);
  EXPECT_EQ(pinned_bytes_of_backups() + host_bytes_of_backups(), 0u);
  EXPECT_EQ(Live::now().registered_ranges, 0u);
}

TEST_F(BackupPinning, NotInsteadOfMemoryThatWasPrepared) {
  claim(OperationKind::kPrepare)->commit();
  cycle(1);
  EXPECT_FALSE(is_pinned()) << "the pause that was prepared must not wait for it";
  cycle(1);
  EXPECT_TRUE(is_pinned());
}

TEST_F(BackupPinning, NotWhereNothingIsKept) {
  const CUdeviceptr other = alloc("other", kSize);
  fill(other, kSize, 9);
  for (int turn = 0; turn < 3; ++turn) {
    pause({"other"});
    const auto stored = core().registry.find(other)->stored;
    EXPECT_FALSE(stored->is_pinned());
    resume({"other"});
  }
  EXPECT_TRUE(holds(other, kSize, 9));
}

TEST_F(BackupPinning, NotWherePinnedMemoryHasALimit) {
  core().budgets.pinned.set_limit(kSize * 8);
  cycle(1);
  cycle(1);
  EXPECT_FALSE(is_pinned()) << "rings and pinned backups need it";
  core().budgets.pinned.set_limit(kUnlimited);
  cycle(1);
  EXPECT_TRUE(is_pinned());
}

TEST_F(BackupPinning, NotABackupThatIsNew) {
  cycle(1);
  pause();
  resume_without_retaining();
  claim(OperationKind::kPrepare)->commit();
  cycle(1);
  EXPECT_FALSE(is_pinned());
}

TEST_F(BackupPinning, NotWhereCopiesAheadMakePausesQuick) {
  core().rules.keeps_ahead.store(true);
  cycle(1);
  cycle(1);
  EXPECT_FALSE(is_pinned());
}

TEST_F(BackupPinning, APauseGoesOnWhereTheDriverPinsNothing) {
  cycle(1);
  fill(address_, kSize, 2);
  sim().fail("cuMemHostRegister", 1, kOther, 0);
  // Its ring finds no pinned memory either, but for the one that the first pause left.
  cycle(2);
  sim().clear_failures();
  EXPECT_FALSE(is_pinned());
  EXPECT_EQ(pinned_bytes_of_backups(), 0u);
}

// 3 of 4 chunks have one value and had no host memory.
TEST_F(BackupPinning, LittleThatIsMissingIsTaken) {
  std::memset(reinterpret_cast<void*>(address_ + kChunk), 7, kSize - kChunk);
  for (uint64_t turn = 0; turn < 4; ++turn) {
    fill(address_, kChunk, turn);
    pause();
    EXPECT_EQ(is_pinned(), turn > 0);
    EXPECT_EQ(host_bytes_of_backups(), turn > 0 ? kSize : kChunk);
    EXPECT_EQ(pinned_bytes_of_backups(), turn > 0 ? kSize : 0);
    resume();
    EXPECT_TRUE(holds(address_, kChunk, turn));
    EXPECT_EQ(*reinterpret_cast<const unsigned char*>(address_ + kSize - 1), 7);
  }
  fill(address_, kSize, 9);
  cycle(9);
  EXPECT_EQ(host_bytes_of_backups(), kSize) << "the memory was there";
  resume_after_giving_back();
  EXPECT_EQ(host_bytes_of_backups(), 0u);
}

TEST_F(BackupPinning, WhatIsMissingGoesBackWhereTheDriverPinsNothing) {
  std::memset(reinterpret_cast<void*>(address_ + kChunk), 7, kSize - kChunk);
  pause();
  resume();
  sim().fail("cuMemHostRegister", 1, kOther, 0);
  for (uint64_t seed = 2; seed < 4; ++seed) {
    fill(address_, kChunk, seed);
    pause();
    EXPECT_FALSE(is_pinned());
    EXPECT_EQ(backup()->charge.size_bytes(), kChunk);
    EXPECT_EQ(core().budgets.pinned.held_bytes(), core().engines.held_bytes());
    resume();
    EXPECT_TRUE(holds(address_, kChunk, seed));
    EXPECT_EQ(*reinterpret_cast<const unsigned char*>(address_ + kSize - 1), 7);
  }
  sim().clear_failures();
}

TEST_F(BackupPinning, NothingIsTakenForABackupWithoutBytes) {
  std::memset(reinterpret_cast<void*>(address_), 7, kSize);
  for (int turn = 0; turn < 3; ++turn) {
    pause();
    EXPECT_FALSE(is_pinned());
    EXPECT_EQ(host_bytes_of_backups(), 0u);
    resume();
  }
  EXPECT_EQ(*reinterpret_cast<const unsigned char*>(address_ + kSize - 1), 7);
}

// Each lacks 3 chunks of 4.
TEST_F(BackupPinning, OnePauseTakesAnEighthOfWhatTheHostHasFree) {
  const CUdeviceptr other = alloc_retained(kSize);
  for (const CUdeviceptr address : {address_, other}) {
    std::memset(reinterpret_cast<void*>(address), 7, kSize);
    fill(address, kChunk, 1);
  }
  pause();
  resume();
  HostBudget& budget = core().budgets.host;
  budget.set_limit(2 * kGiB);
  // Free: what both are promised before, and eight times 4 chunks.
  const HostCharge others = budget.charge(2 * kGiB - budget.held_bytes() - 6 * kChunk - 8 * 4 * kChunk, "others");
  for (const CUdeviceptr address : {address_, other}) fill(address, kChunk, 2);
  pause();
  const auto is_pinned_at = [&](CUdeviceptr address) { return core().registry.find(address)->stored->is_pinned(); };
  EXPECT_NE(is_pinned_at(address_), is_pinned_at(other)) << "4 chunks may be taken, and each lacks 3";
  resume();
  for (const CUdeviceptr address : {address_, other}) EXPECT_TRUE(holds(address, kChunk, 2));
  budget.set_limit(kUnlimited);
}

TEST_F(BackupPinning, MuchThatIsMissingIsNot) {
  const uint64_t size_bytes = 18 * kChunk;
  const CUdeviceptr other =
      allocate(core(), core().registry.tag("other"), {.backup = BackupKind::kRam, .retain = true}, 0, size_bytes);
  std::memset(reinterpret_cast<void*>(other), 7, size_bytes);
  fill(other, kChunk, 1);
  for (int turn = 0; turn < 3; ++turn) {
    pause({"other"});
    EXPECT_FALSE(core().registry.find(other)->stored->is_pinned());
    EXPECT_EQ(host_bytes_of_backups(), kChunk);
    resume({"other"});
    EXPECT_TRUE(holds(other, kChunk, 1));
  }
  fill(other + kChunk, kChunk, 2);
  pause({"other"});
  resume({"other"});
  fill(other, kChunk, 3);
  pause({"other"});
  EXPECT_TRUE(core().registry.find(other)->stored->is_pinned()) << "16 chunks are 32 MiB";
  resume({"other"});
  EXPECT_TRUE(holds(other, kChunk, 3));
  EXPECT_TRUE(holds(other + kChunk, kChunk, 2));
}

TEST_F(BackupPinning, APauseGoesOnWhereTheHostHasNoneToGive) {
  std::memset(reinterpret_cast<void*>(address_ + kChunk), 7, kSize - kChunk);
  pause();
  resume();
  core().engines.trim();
  core().budgets.host.set_limit(core().budgets.host.held_bytes() + 3 * kChunk + policy::kLeastRingBytes + kMiB);
  for (uint64_t seed = 2; seed < 4; ++seed) {
    fill(address_, kChunk, seed);
    pause();  // which may copy all of it, through a ring
    EXPECT_FALSE(is_pinned()) << "the ring needs it";
    EXPECT_EQ(pinned_bytes_of_backups(), 0u);
    EXPECT_EQ(host_bytes_of_backups(), kChunk);
    resume();
    EXPECT_TRUE(holds(address_, kChunk, seed));
  }
  core().budgets.host.set_limit(kUnlimited);
  cycle_with(4);
  EXPECT_TRUE(is_pinned()) << "there is room now";
}

TEST_F(BackupPinning, WhatIsSeenOfItStays) {
  cycle(1);
  cycle(1);
  pause();
  const auto view = view_backup(core(), {address_, kSize});
  ASSERT_TRUE(view);
  resume();
  EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(view->bytes()), kSize, 1));
  fill(address_, kSize, 2);
  cycle(2);
  EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(view->bytes()), kSize, 1));
}

TEST_F(BackupPinning, Invariant9_AFreeUnpinsNothingBesideACapture) {
  cycle(1);
  cycle(1);
  pause();
  core().engines.trim();
  ASSERT_EQ(Live::now().registered_ranges, 1u);
  core().capture_gate.begin_capture();
  deallocate(core(), address_);
  EXPECT_EQ(Live::now().registered_ranges, 1u);
  core().capture_gate.end_capture();
  EXPECT_TRUE(give_back_caches(core()));
  EXPECT_EQ(Live::now().registered_ranges, 0u);
}

TEST_F(BackupPinning, Invariant9_NorDoesTheLastViewThatDies) {
  cycle(1);
  cycle(1);
  pause();
  auto view = view_backup(core(), {address_, kSize});
  resume();
  core().engines.trim();
  ASSERT_EQ(Live::now().registered_ranges, 1u) << "the view's";
  core().capture_gate.begin_capture();
  view.reset();
  EXPECT_EQ(Live::now().registered_ranges, 1u);
  core().capture_gate.end_capture();
  EXPECT_TRUE(give_back_caches(core()));
  EXPECT_EQ(Live::now().registered_ranges, 0u);
}

TEST_F(BackupPinning, ItGoesOnInASwap) {
  cycle(1);
  cycle(1);
  pause();
  const CUdeviceptr other = alloc("other", kSize);
  fill(other, kSize, 9);
  OperationRequest request;
  request.tags.names = {"other"};
  request.resume_tags.names = {"w"};
  Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  EXPECT_TRUE(holds(address_, kSize, 1));
  EXPECT_TRUE(is_pinned());
  resume({"other"});
  EXPECT_TRUE(holds(other, kSize, 9));
}

TEST(Pinning, TakesAnEighthOfWhatIsFree) {
  EXPECT_EQ(policy::takeable_bytes(0), 0u);
  EXPECT_EQ(policy::takeable_bytes(8 * kMiB), kMiB) << "the ring needs the rest";
}

TEST(Pinning, OfSmallPausesAndWithinAnEighthOfTheMachine) {
  EXPECT_TRUE(policy::is_small_pause(kGiB));
  EXPECT_FALSE(policy::is_small_pause(kGiB + 1)) << "the ring fills the bus";
  EXPECT_TRUE(policy::has_room_to_pin(kGiB, kGiB, 16 * kGiB));
  EXPECT_FALSE(policy::has_room_to_pin(kGiB, kGiB + 1, 16 * kGiB));
  EXPECT_FALSE(policy::has_room_to_pin(kGiB, 16 * kGiB, kGiB));
}

}  // namespace
}  // namespace ebbtide::testing
