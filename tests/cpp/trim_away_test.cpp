// A trim of allocations that are away frees their backups, and a resume leaves them out.
#include "base/error.h"
#include "core/operation/backup_view.h"
#include "moves_faults.h"

namespace ebbtide::testing {
namespace {

class TrimAwayTest : public MovesFaults {
 protected:
  uint64_t backup_bytes() { return core().budgets.host.held_bytes() - core().engines.held_bytes(); }
  const Allocation& find(size_t index) { return *core().registry.find(items_[index].address); }
  void trim(const std::vector<size_t>& indices) {
    std::vector<CUdeviceptr> addresses;
    for (const size_t index : indices) addresses.push_back(items_[index].address);
    run_at(OperationKind::kTrim, {"w"}, addresses);
  }
  void bring_back(size_t index) { run_at(OperationKind::kResume, {"w"}, {items_[index].address}); }
};

TEST_F(TrimAwayTest, Invariant7_TheBackupGoesAndAResumeLeavesItOut) {
  const DiskDirectory directory;
  for (const Policy& policy : {kRam, kRetained, kPinned, kDisk, kNone}) {
    build({{"w", kRam, 0, {2}}, {"w", policy, 0, {1, 2}}});
    pause();
    trim({1});
    EXPECT_EQ(backup_bytes(), 2 * kChunk);
    EXPECT_EQ(core().budgets.pinned.held_bytes(), core().engines.held_bytes());
    EXPECT_TRUE(find(1).is_trimmed);
    EXPECT_EQ(find(1).stored, nullptr);
    expect_sound("trimmed");
    core().budgets.device.set_limit(2 * kChunk);
    EXPECT_EQ(resume().totals().bytes, 2 * kChunk);
    core().budgets.device.set_limit(kUnlimited);
    EXPECT_FALSE(core().registry.is_any_away(core().registry.tag("w"))) << "its region may be entered";
    pause();
    trim({1});
    resume();
    bring_back(1);
    expect_bytes("zeros");
    free_all();
    expect_nothing_left();
  }
}

TEST_F(TrimAwayTest, OnlyAbsentMemoryMayBeTrimmedWhileTheRegionIsOpen) {
  build({{"w", kRam, 0, {1}}});
  pause();
  const CUdeviceptr fresh = alloc("w", kChunk);
  const LeaseInfo lease = open_lease(core(), "w", "somebody");
  trim({0});
  EXPECT_TRUE(find(0).is_trimmed);
  EXPECT_EQ(open_lease(core(), "w", "another").epoch, lease.epoch) << "no pool is retired for it";
  EXPECT_THROW(run_at(OperationKind::kTrim, {"w"}, {fresh}), StateError);
  deallocate(core(), fresh);
}

TEST_F(TrimAwayTest, ViewedMemoryStaysReadableAndCounted) {
  build({{"w", kRam, 0, {1}}});
  pause();
  {
    const auto view = view_backup(core(), {items_[0].address, kChunk});
    ASSERT_TRUE(view);
    const std::vector<std::byte> before(view->bytes(), view->bytes() + kChunk);
    trim({0});
    EXPECT_EQ(std::memcmp(view->bytes(), before.data(), kChunk), 0);
    EXPECT_EQ(backup_bytes(), kChunk);
    bring_back(0);
    EXPECT_TRUE(is_zero(items_[0].address, kChunk));
    EXPECT_EQ(std::memcmp(view->bytes(), before.data(), kChunk), 0);
  }
  EXPECT_EQ(backup_bytes(), 0u);
}

TEST_F(TrimAwayTest, ATrimTakesResidentAndAbsentMemory) {
  build({{"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}});
  pause();
  bring_back(0);
  trim({0, 1});
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  EXPECT_EQ(backup_bytes(), 0u);
  EXPECT_EQ(resume().totals().bytes, 0u);
}

TEST_F(TrimAwayTest, Invariant3_TrimsOfAbsentBesideResidentMemory) {
  const DiskDirectory directory;
  const auto idle = [&] {
    return std::vector<CUdeviceptr>{items_[0].address, items_[1].address, items_[2].address, items_[3].address};
  };
  const Act trim_it = [&] { run_at(OperationKind::kTrim, {"w"}, idle()); };
  const Act come_halfway = [&] {
    pause();
    run_at(OperationKind::kResume, {"w"}, {items_[2].address});
  };
  sweep_all({.items = {{"w", kRam, 0, {1}},
                       {"w", kPinned, 0, {1, 1}},
                       {"w", kRetained, 0, {1}},
                       {"w", kDisk, 1, {1}},
                       {"w", kRam, 0, {1}}},
             .prepare = come_halfway,
             .act = trim_it,
             .finishes = {trim_it, [&] { resume(); }, [&] { pause(); }},
             .trimmed = idle});
  EXPECT_TRUE(directory.is_empty());
}

// Allocations of which a part died while they were away.
TEST_F(TrimAwayTest, Invariant2_UnusedBlocksNeedNotComeBack) {
  build({{"w", kRetained, 0, {2, 2}}, {"w", kRam, 0, {1}}});
  pause();
  OperationRequest request;
  request.unused =
      AddressRanges({{items_[0].address + kChunk / 2, 3 * kChunk}});  // covers only blocks 1 and 2 as a whole
  request.unused_as_of = core().registry.leases.newest();
  const Report report = Operation::claim(core(), OperationKind::kResume, request)->commit().front();
  EXPECT_EQ(report.totals().copied, 3 * kChunk);
  EXPECT_EQ(report.totals().unused, 2 * kChunk);
  items_[0].content[1] = items_[0].content[2] = 0;
  expect_bytes("back");
  pause();
  expect_sound("paused again");
  resume();
  expect_bytes("back again");
}

TEST_F(TrimAwayTest, Invariant2_BlocksThatALaterLeaseMayUseComeBack) {
  build({{"w", kRam, 0, {2}}});
  pause();
  OperationRequest request;
  request.unused = AddressRanges({{items_[0].address, 2 * kChunk}});
  request.unused_as_of = core().registry.leases.newest();
  core().registry.leases.close(open_lease(core(), "w", "somebody").id);
  EXPECT_EQ(Operation::claim(core(), OperationKind::kResume, request)->commit().front().totals().copied, 2 * kChunk);
  expect_bytes("back");
}

}  // namespace
}  // namespace ebbtide::testing
