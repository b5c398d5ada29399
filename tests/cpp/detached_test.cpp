// A chunk whose bytes a separation left intact in unmapped memory, and the effect of each operation on it.
#include "base/error.h"
#include "core/operation/backup_view.h"
#include "core/operation/pending.h"
#include "shared_fixture.h"
#include "store_fixture.h"

namespace ebbtide::testing {
namespace {

const Policy kRam = {BackupKind::kRam};
const Policy kRetained = {BackupKind::kRam, true};

// Three chunks share a handle and are separated because of the first. Then some of them could not be mapped, or could
// not be given access: the first ones, unless a test says otherwise.
class DetachedTest : public SharedTest {
 protected:
  void detach(const Policy& policy = kRam, uint64_t count = 1, const char* call = "cuMemMap", uint64_t first = 0,
              bool is_undone = true) {
    parts_ = make("w", 3, policy);
    come_back();
    if (policy.backup == BackupKind::kNone) {
      for (const CUdeviceptr address : parts_) write(address, kChunk);
    }
    // Access that is refused with the peers is asked for without them.
    const bool is_asked_twice = std::string(call) == "cuMemSetAccess" && core().peers.of(0).any();
    const bool is_map = std::string(call) == "cuMemMap";
    // Where the first chunk is refused, the old memory is mapped again, unless the addresses are still taken.
    const uint64_t refused = count + (first == 0 && (is_map || is_undone) ? 1 : 0);
    sim().fail(call, 4 + first, kOther, is_asked_twice ? 2 * refused : refused);  // the first three: the spare range
    EXPECT_THROW(separate({parts_[0]}), DriverError);
    sim().clear_failures();
    give_back_caches(core());  // an undo may have failed as well
    expect_detached(count, first);
  }
  void expect_detached(uint64_t count, uint64_t first = 0) {
    for (uint64_t index = 0; index < parts_.size(); ++index) {
      const bool is_one = index >= first && index < first + count;
      EXPECT_EQ(is_detached(parts_[index]), is_one);
      EXPECT_EQ(core().registry.is_away(parts_[index], 1), is_one);
      if (!is_one) {
        EXPECT_TRUE(is_whole(parts_[index]));
      }
    }
    EXPECT_TRUE(is_partial("w"));
    EXPECT_EQ(resident_bytes("w"), (parts_.size() - count) * kChunk);
    const Amounts found = amounts("w");
    EXPECT_EQ(found.detached_bytes, count * kChunk);
    EXPECT_TRUE(has_every_byte_once(found));
    expect_device_bytes(parts_.size() * kChunk);
    EXPECT_EQ(Live::now().mappings + count, Live::now().handles);
  }
  bool is_detached(CUdeviceptr address) { return core().registry.find(address)->chunks.front().is_detached.load(); }
  // All of it is back, and after the frees nothing is left.
  void expect_end() {
    EXPECT_FALSE(is_partial("w"));
    expect_device_bytes(parts_.size() * kChunk);
    expect_whole(parts_);
    free_all(parts_);
    expect_device_bytes(0);
  }

  std::vector<CUdeviceptr> parts_;
};

TEST_F(DetachedTest, Invariant3_ItIsAwayAndItsTagIsPartial) {
  for (const uint64_t count : {1, 2, 3}) {
    detach(kRam, count);
    const LeaseInfo lease = open_lease(core(), "w", "a test");
    EXPECT_TRUE(lease.is_away) << "what enters gets a fresh pool";
    core().registry.leases.close(lease.id);
    EXPECT_FALSE(view_backup(core(), {parts_[0], kChunk})) << "its bytes are in no store";
    char tag[8];
    bool is_away = false;
    EXPECT_TRUE(core().registry.find_in_handler(parts_[0], tag, sizeof tag, &is_away));
    EXPECT_TRUE(is_away);
    free_all(parts_);
    EXPECT_FALSE(is_partial("w"));
    expect_device_bytes(0);
  }
  expect_no_leak();
}

// Whichever call failed, for whichever of them, and whether or not the mapping could be undone.
TEST_F(DetachedTest, Invariant3_ItsBytesAreWholeAndCountedWhereTheyAre) {
  for (const char* call : {"cuMemMap", "cuMemSetAccess"}) {
    for (const uint64_t first : {0, 1, 2}) {
      for (const bool is_undone : {true, false}) {
        SCOPED_TRACE(std::string(call) + " of chunk " + std::to_string(first) + (is_undone ? "" : ", and its undo"));
        if (!is_undone) sim().fail("cuMemUnmap", 8, kOther, 0);  // three in a pause, four in a separation
        detach(kRam, 1, call, first, is_undone);
        EXPECT_EQ(resume().totals().copied, 0u);
        EXPECT_EQ(amounts("w").detached_bytes, 0u);
        expect_end();
      }
    }
  }
  expect_no_leak();
}

TEST_F(DetachedTest, Invariant3_AResumeMapsItAndCopiesNothing) {
  for (const uint64_t count : {1, 2, 3}) {
    detach(kRam, count);
    sim().clear_log();
    EXPECT_EQ(resume().totals().copied, 0u);
    EXPECT_EQ(sim().calls("cuMemMap"), count);
    EXPECT_EQ(sim().calls("cuMemCreate"), 0u);
    EXPECT_EQ(handles(), 3u);
    expect_end();
  }
  expect_no_leak();
}

TEST_F(DetachedTest, Invariant3_SoDoesOneInTheBackgroundOrOfItAlone) {
  detach(kRam, 2);
  EXPECT_EQ(run_at(OperationKind::kResume, {"w"}, {parts_[1]}).totals().copied, 0u);
  EXPECT_TRUE(is_whole(parts_[1]));
  expect_detached(1);
  PendingResume::start(claim(OperationKind::kResume))->wait();
  expect_end();
  expect_no_leak();
}

TEST_F(DetachedTest, Invariant3_AResumeWhoseMappingFailsAgainLeavesItWhole) {
  detach(kRam, 2);
  sim().fail("cuMemMap", 1, kOther, 1);
  EXPECT_THROW(resume(), DriverError);
  sim().clear_failures();
  expect_detached(2);
  resume();
  expect_end();
  expect_no_leak();
}

TEST_F(DetachedTest, Invariant3_APauseTakesItOutWhole) {
  const DiskDirectory directory;
  for (const Policy& policy : {kRam, kRetained, Policy{BackupKind::kPinned}, Policy{BackupKind::kDisk}}) {
    for (const uint64_t count : {1, 3}) {
      detach(policy, count);
      EXPECT_EQ(pause().totals().bytes, 3 * kChunk);
      expect_device_bytes(0);
      EXPECT_FALSE(is_partial("w"));
      resume();
      EXPECT_EQ(handles(), 1u);
      expect_end();
    }
  }
  expect_no_leak();
}

// Memory that is partly away keeps its backup.
TEST_F(DetachedTest, Invariant3_SoDoesOneIntoAnotherStore) {
  for (const Policy& policy : {kRam, kRetained}) {
    detach(policy);
    write(parts_[1], kChunk);
    pause({}, BackupKind::kPinned);
    expect_device_bytes(0);
    resume();
    expect_end();
  }
  expect_no_leak();
}

TEST_F(DetachedTest, Invariant3_WithoutABackupItIsDropped) {
  for (const Policy& policy : {kRam, Policy{BackupKind::kNone}}) {
    detach(policy);
    EXPECT_EQ(pause({}, BackupKind::kNone).totals().bytes, 3 * kChunk);
    expect_device_bytes(0);
    EXPECT_FALSE(is_detached(parts_[0]));
    EXPECT_FALSE(is_partial("w"));
    resume();
    for (const CUdeviceptr address : parts_) {
      EXPECT_TRUE(is_zero(address, kChunk));
      write(address, kChunk);
    }
    expect_end();
  }
  expect_no_leak();
}

TEST_F(DetachedTest, Invariant3_APauseThatCantMapItChangesNothing) {
  for (const Policy& policy : {kRam, kRetained, Policy{BackupKind::kPinned}}) {
    detach(policy, 2);
    core().engines.trim();
    const Live before = Live::now();
    const uint64_t host_bytes = core().budgets.host.held_bytes();
    sim().fail("cuMemMap", 1, kOther, 1);
    EXPECT_THROW(pause(), DriverError);
    sim().clear_failures();
    expect_detached(2);
    EXPECT_EQ(Live::now(), before);
    EXPECT_EQ(core().budgets.host.held_bytes(), host_bytes);
    // The first is mapped by then and stays mapped.
    sim().fail("cuMemMap", 2, kOther, 1);
    EXPECT_THROW(pause(), DriverError);
    sim().clear_failures();
    EXPECT_FALSE(is_detached(parts_[0]));
    EXPECT_TRUE(is_detached(parts_[1]));
    EXPECT_TRUE(is_partial("w"));
    EXPECT_TRUE(is_whole(parts_[0]));
    expect_device_bytes(3 * kChunk);
    pause();
    expect_device_bytes(0);
    resume();
    expect_end();
  }
  expect_no_leak();
}

// If a pause maps chunks and then cannot take them, they stay mapped: all memory is resident again.
TEST_F(DetachedTest, Invariant3_APauseThatFailsAfterItMappedItLeavesItResident) {
  detach(kRam, 2);
  core().budgets.host.set_limit(1);
  EXPECT_THROW(pause(), StoreError);
  core().budgets.host.set_limit(kUnlimited);
  EXPECT_EQ(resident_bytes("w"), 3 * kChunk);
  expect_end();
  expect_no_leak();
}

TEST_F(DetachedTest, Invariant3_ASwapTakesItOutAndBringsItBack) {
  detach(kRam, 2);
  const auto other = make("other", 3);
  pause({"other"});
  core().budgets.device.set_limit(3 * kChunk);
  EXPECT_EQ(swap({"w"}, {"other"}).front().totals().bytes, 3 * kChunk);
  expect_whole(other);
  expect_device_bytes(3 * kChunk);
  EXPECT_FALSE(is_partial("w"));
  swap({"other"}, {"w"});
  expect_end();
}

TEST_F(DetachedTest, Invariant3_ASwapThatBringsItsTagBackMapsIt) {
  detach(kRam, 2);
  const auto other = make("other", 1);
  EXPECT_EQ(swap({"other"}, {"w"}).back().totals().copied, 0u);
  expect_end();
  resume();
  expect_whole(other);
}

TEST_F(DetachedTest, Invariant3_ATrimTakesItAndAResumeThatNamesItGivesNewMemory) {
  detach();
  EXPECT_FALSE(is_any_shared({parts_[0]}));
  EXPECT_EQ(trim({parts_[0]}).totals().bytes, kChunk);
  expect_device_bytes(2 * kChunk);
  EXPECT_FALSE(is_detached(parts_[0]));
  EXPECT_FALSE(is_partial("w"));
  expect_whole({parts_[1], parts_[2]});
  EXPECT_EQ(resume().totals().bytes, 0u);
  EXPECT_EQ(run_at(OperationKind::kResume, {"w"}, {parts_[0]}).totals().bytes, kChunk);
  EXPECT_TRUE(is_zero(parts_[0], kChunk));
  write(parts_[0], kChunk);
  expect_end();
}

// It counts as trimmed, since only a resume that names it brings it back. Its bytes are in its memory still.
TEST_F(DetachedTest, Invariant3_ATrimThatFailsBeforeItTookItLeavesItWhole) {
  detach(kRam, 1, "cuMemSetAccess", 2);
  sim().fail("cuMemUnmap", 2, kOther, 1);  // the second one's
  EXPECT_THROW(trim(parts_), DriverError);
  sim().clear_failures();
  EXPECT_TRUE(is_detached(parts_[2]));
  const Amounts found = amounts("w");
  EXPECT_EQ(found.trimmed_bytes, 2 * kChunk);
  EXPECT_EQ(found.detached_bytes, 0u);
  EXPECT_TRUE(has_every_byte_once(found));
  expect_device_bytes(2 * kChunk);
  run_at(OperationKind::kResume, {"w"}, {parts_[2]});
  expect_whole({parts_[1], parts_[2]});
  EXPECT_EQ(trim(parts_).totals().bytes, 2 * kChunk);
  EXPECT_EQ(amounts("w").trimmed_bytes, 3 * kChunk);
  free_all(parts_);
  expect_device_bytes(0);
}

TEST_F(DetachedTest, Invariant3_ATrimOfAnotherLeavesItAsItIs) {
  detach();
  EXPECT_EQ(trim({parts_[2]}).totals().bytes, kChunk);
  EXPECT_TRUE(is_detached(parts_[0]));
  EXPECT_TRUE(is_partial("w"));
  resume();
  EXPECT_FALSE(is_partial("w"));
  expect_whole({parts_[0], parts_[1]});
  expect_device_bytes(2 * kChunk);
}

TEST_F(DetachedTest, Invariant3_AFreeOfItLeavesTheOthers) {
  detach();
  deallocate(core(), parts_[0]);
  expect_device_bytes(2 * kChunk);
  EXPECT_FALSE(is_partial("w"));
  expect_whole({parts_[1], parts_[2]});
  EXPECT_EQ(make("w", 1).front(), parts_[0]) << "its addresses are free";
  come_back();
  expect_end();
}

// These operations do not concern the detached chunk.
TEST_F(DetachedTest, Invariant3_OtherOperationsLeaveItAsItIs) {
  detach(kRam, 2);
  const Live before = Live::now();
  for (const OperationKind kind : {OperationKind::kSeparate, OperationKind::kPromote, OperationKind::kDemote}) {
    EXPECT_EQ(run_at(kind, {"w"}, {parts_[0]}).totals().copied, 0u);
    expect_detached(2);
    EXPECT_EQ(Live::now(), before);
  }
  claim(OperationKind::kPrepare)->commit();
  core().peers.refresh(true);
  expect_detached(2);
  resume();
  expect_end();
}

// The chunks beside it share another handle, and are separated later.
TEST_F(DetachedTest, Invariant3_AnotherHandleOfItsTagIsSeparatedBesideIt) {
  detach();
  const auto more = make("w", 2);
  OperationRequest request;
  request.tags = {{"w"}, more, false};
  Operation::claim(core(), OperationKind::kPause, request)->commit();
  run_at(OperationKind::kResume, {"w"}, more);
  EXPECT_TRUE(is_any_shared({more[0]}));
  separate({more[0]});
  EXPECT_FALSE(is_any_shared({more[0]}));
  expect_whole(more);
  EXPECT_TRUE(is_detached(parts_[0]));
  EXPECT_TRUE(is_partial("w"));
  free_all(more);
  resume();
  expect_end();
}

}  // namespace
}  // namespace ebbtide::testing
