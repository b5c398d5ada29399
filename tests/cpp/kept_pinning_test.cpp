// Small backups in RAM that are kept: pinned where they lie, at the second pause.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "core/operation/backup_view.h"
#include "core_fixture.h"
#include "policy/pinning.h"

namespace ebbtide::testing {
namespace {

constexpr int kOther = 999;

class KeptPinning : public CoreTest {
 protected:
  KeptPinning() : address_(alloc_retained(kChunks * kChunk)) { fill(address_, kSize, 1); }
  static constexpr size_t kChunks = 4;
  static constexpr uint64_t kSize = kChunks * kChunk;

  CUdeviceptr alloc_retained(uint64_t size_bytes) {
    return allocate(core(), core().registry.tag("w"), {.backup = BackupKind::kRam, .retain = true}, 0, size_bytes);
  }
  std::shared_ptr<BackupRecord> backup() { return core().registry.backup_of(*core().registry.find(address_)); }
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
  void resume_without_retaining() {
    OperationRequest request;
    request.retain = false;
    Operation::claim(core(), OperationKind::kResume, std::move(request))->commit();
  }

  const CUdeviceptr address_;
};

TEST_F(KeptPinning, AtTheSecondPauseAndUntilTheBackupGoes) {
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

TEST_F(KeptPinning, NotInsteadOfMemoryThatWasPrepared) {
  claim(OperationKind::kPrepare)->commit();
  cycle(1);
  EXPECT_FALSE(is_pinned()) << "the pause that was prepared must not wait for it";
  cycle(1);
  EXPECT_TRUE(is_pinned());
}

TEST_F(KeptPinning, NotWhereNothingIsKept) {
  const CUdeviceptr other = alloc("other", kSize);
  fill(other, kSize, 9);
  for (int turn = 0; turn < 3; ++turn) {
    pause({"other"});
    const auto stored = core().registry.backup_of(*core().registry.find(other));
    EXPECT_FALSE(stored->is_pinned());
    resume({"other"});
  }
  EXPECT_TRUE(holds(other, kSize, 9));
}

TEST_F(KeptPinning, NotWherePinnedMemoryHasALimit) {
  core().budgets.pinned.set_limit(kSize * 8);
  cycle(1);
  cycle(1);
  EXPECT_FALSE(is_pinned()) << "rings and pinned backups need it";
  core().budgets.pinned.set_limit(kUnlimited);
  cycle(1);
  EXPECT_TRUE(is_pinned());
}

TEST_F(KeptPinning, NotABackupThatIsNew) {
  cycle(1);
  pause();
  resume_without_retaining();
  claim(OperationKind::kPrepare)->commit();
  cycle(1);
  EXPECT_FALSE(is_pinned());
}

TEST_F(KeptPinning, NotWhereCopiesAheadMakePausesQuick) {
  core().rules.keeps_ahead.store(true);
  cycle(1);
  cycle(1);
  EXPECT_FALSE(is_pinned());
}

TEST_F(KeptPinning, APauseGoesOnWhereTheDriverPinsNothing) {
  cycle(1);
  fill(address_, kSize, 2);
  sim().fail("cuMemHostRegister", 1, kOther, 0);
  // Its ring finds no pinned memory either, but for the one that the first pause left.
  cycle(2);
  sim().clear_failures();
  EXPECT_FALSE(is_pinned());
  EXPECT_EQ(pinned_bytes_of_backups(), 0u);
}

// 3 of 4 blocks have one value and take no host memory.
TEST_F(KeptPinning, NoMemoryIsTakenForIt) {
  std::memset(reinterpret_cast<void*>(address_ + kChunk), 7, kSize - kChunk);
  for (int turn = 0; turn < 3; ++turn) {
    pause();
    EXPECT_FALSE(is_pinned());
    EXPECT_EQ(host_bytes_of_backups(), kChunk);
    resume();
    EXPECT_TRUE(holds(address_, kChunk, 1));
  }
}

TEST_F(KeptPinning, WhatIsSeenOfItStays) {
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

TEST_F(KeptPinning, Invariant9_AFreeUnpinsNothingBesideACapture) {
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

TEST_F(KeptPinning, Invariant9_NorDoesTheLastViewThatDies) {
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

TEST_F(KeptPinning, ItGoesOnInASwap) {
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

TEST(Pinning, OfSmallPausesAndWithinAnEighthOfTheMachine) {
  EXPECT_TRUE(policy::is_small_pause(kGiB));
  EXPECT_FALSE(policy::is_small_pause(kGiB + 1)) << "the ring fills the bus";
  EXPECT_TRUE(policy::has_room_to_pin(kGiB, kGiB, 16 * kGiB));
  EXPECT_FALSE(policy::has_room_to_pin(kGiB, kGiB + 1, 16 * kGiB));
  EXPECT_FALSE(policy::has_room_to_pin(kGiB, 16 * kGiB, kGiB));
}

}  // namespace
}  // namespace ebbtide::testing
