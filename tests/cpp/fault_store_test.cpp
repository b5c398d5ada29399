// Fault injection: stores that fail in the middle of a pause, a resume or a swap, and too little host memory.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "base/error.h"
#include "hooked_backup.h"
#include "moves_world.h"
#include "policy/copy_plan.h"

namespace ebbtide::testing {
namespace {

const Policy kRam = {BackupKind::kRam};
const Policy kDisk = {BackupKind::kDisk};
const Policy kNone = {BackupKind::kNone};

// The behaviour of the file calls below. Calls are counted from the last assignment.
struct FileFaults {
  int calls = 0;
  int failing_call = 0;  // 0: none
  int error = 0;
  size_t most_bytes = SIZE_MAX;  // how much one request reports as moved
};
FileFaults file_faults;

// The claimed ranges, as offset and size, and whether every claim is refused.
std::vector<std::pair<off_t, off_t>> claims;
bool is_disk_full = false;

bool is_failing() {
  if (++file_faults.calls != file_faults.failing_call) return false;
  errno = file_faults.error;
  return true;
}
ssize_t short_of(ssize_t moved) {
  return std::min(moved, static_cast<ssize_t>(std::min<size_t>(file_faults.most_bytes, SSIZE_MAX)));
}
ssize_t faulty_pwrite(int file, const void* bytes, size_t size_bytes, off_t offset) {
  return is_failing() ? -1 : short_of(::pwrite(file, bytes, size_bytes, offset));
}
ssize_t faulty_pread(int file, void* bytes, size_t size_bytes, off_t offset) {
  return is_failing() ? -1 : short_of(::pread(file, bytes, size_bytes, offset));
}
int faulty_fallocate(int file, int mode, off_t offset, off_t size_bytes) {
  if (mode == 0) claims.emplace_back(offset, size_bytes);
  if (mode == 0 && is_disk_full) {
    errno = ENOSPC;
    return -1;
  }
  return ::fallocate(file, mode, offset, size_bytes);
}
const FileCalls& faulty_calls() {
  static const FileCalls calls = [] {
    FileCalls faulty = kSystemFileCalls;
    faulty.pwrite = faulty_pwrite;
    faulty.pread = faulty_pread;
    faulty.fallocate = faulty_fallocate;
    return faulty;
  }();
  return calls;
}

class StoreFaults : public MovesWorld {
 protected:
  // As after a prepare with a store that fails.
  void install(size_t item, std::unique_ptr<Backup> backup) {
    const auto allocation = core().registry.find(items_[item].address);
    core().registry.replace(
        allocation->stored,
        std::make_shared<BackupRecord>(allocation->policy.backup, std::move(backup), allocation->size_bytes()));
  }
  void install_hooked(size_t item) {
    const auto count = [this] {
      if (++calls_ == failing_call_) throw StoreError("no memory is left", {kChunk, 0, kUnlimited});
    };
    install(item, std::make_unique<HookedBackup>(items_[item].content.size() * kChunk, count, count));
  }
  // Makes call number k of any store fail. 0 means none.
  void fail_at(int k) {
    calls_ = 0;
    failing_call_ = k;
  }

  int calls_ = 0;
  int failing_call_ = 0;
};

TEST_F(StoreFaults, Invariant3_ADiskThatFailsAtAnyRequestLosesNothing) {
  const DiskDirectory directory;
  const std::vector<ItemSpec> items = {{"w", kDisk, 0, {1, 2, 1}}};
  DiskStore store(faulty_calls());
  constexpr int kRequests = 16;  // 589,824 bytes each
  for (const bool is_pause : {true, false}) {
    bool has_failed = true;
    for (int k = 1; has_failed; k += 3) {
      SCOPED_TRACE((is_pause ? "write " : "read ") + std::to_string(k));
      build(items);
      file_faults = {};
      install(0, store.open(4 * kChunk));
      if (!is_pause) pause();
      // Each request moves fewer bytes than requested.
      file_faults = {0, k, k % 2 == 0 ? ENOSPC : EIO, 600'000};
      const OperationKind kind = is_pause ? OperationKind::kPause : OperationKind::kResume;
      has_failed = false;
      try {
        claim(kind)->commit();
      } catch (const StoreError& error) {
        has_failed = true;
        EXPECT_STRNE(error.what(), "");
      }
      file_faults = {};
      expect_sound("after the failure");
      if (k % 2 == 0) claim(kind)->commit();
      resume();
      expect_bytes("back");
      free_all();
      expect_nothing_left();
      ASSERT_EQ(has_failed, k <= kRequests);
    }
  }
  EXPECT_TRUE(directory.is_empty());
}

// The next pause may treat a chunk that came back before the failure as unchanged. Its file must still hold the bytes
// then.
TEST_F(StoreFaults, Invariant3_WhatCameBackFromDiskBeforeAFailureLeavesAgainWithItsBytes) {
  const DiskDirectory directory;
  DiskStore store(faulty_calls());
  for (const bool is_changed : {false, true}) {
    SCOPED_TRACE(is_changed);
    file_faults = {};
    build({{"w", Policy{.backup = BackupKind::kDisk, .retain = true}, 0, {1, 1, 1}}});
    core().rules.shared_handle_bytes = 0;
    install(0, store.open(3 * kChunk));
    pause();
    file_faults = {0, 2, EIO};
    OperationRequest request;
    request.retain = false;
    EXPECT_THROW(Operation::claim(core(), OperationKind::kResume, std::move(request))->commit(), StoreError);
    EXPECT_EQ(places(), (std::vector<Place>{Place::kDevice, Place::kStored, Place::kStored}));
    if (is_changed) write_block(0, 0, 777);
    const uint64_t clean_before = core().counters.bytes_clean.load();
    pause();
    EXPECT_EQ(core().counters.bytes_clean.load() > clean_before, !is_changed);
    expect_sound("paused");
    resume();
    expect_bytes("back");
    free_all();
  }
}

// Another file may meanwhile own the space that a failed pause has released.
TEST_F(StoreFaults, Invariant3_ADiskThatIsFullAtTheNextTryRefusesItBeforeAnythingMoves) {
  const DiskDirectory directory;
  DiskStore store(faulty_calls());
  build({{"w", kDisk, 0, {1, 1, 1}}});
  core().rules.shared_handle_bytes = 0;
  file_faults = {};
  install(0, store.open(3 * kChunk));
  const auto fail_midway = [&](OperationKind kind, const std::vector<Place>& wanted) {
    file_faults = {0, 2, EIO};
    EXPECT_THROW(claim(kind)->commit(), StoreError);
    file_faults = {};
    EXPECT_EQ(places(), wanted);
    EXPECT_TRUE(is_partial("w"));
  };
  constexpr auto kSize = static_cast<off_t>(kChunk);
  fail_midway(OperationKind::kPause, {Place::kStored, Place::kDevice, Place::kDevice});
  const std::vector<Place> before = places();
  is_disk_full = true;
  EXPECT_THROW(pause(), StoreError);
  is_disk_full = false;
  EXPECT_EQ(places(), before);
  expect_sound("refused");
  claims.clear();
  pause();
  EXPECT_EQ(claims, (std::vector<std::pair<off_t, off_t>>{{kSize, kSize}, {2 * kSize, kSize}}));
  expect_sound("paused");
  fail_midway(OperationKind::kResume, {Place::kDevice, Place::kStored, Place::kStored});
  // Chunks that came back are still in the file, which is freed as a whole at the end.
  is_disk_full = true;
  claims.clear();
  pause();
  EXPECT_TRUE(claims.empty());
  expect_sound("paused");
  is_disk_full = false;
  resume();
  expect_bytes("back");
  free_all();
  EXPECT_TRUE(directory.is_empty());
}

TEST_F(StoreFaults, Invariant3_HostMemoryThatRunsOutMidwayOfAPauseOrAResume) {
  for (int k = 1; k <= 8; ++k) {  // four writes, four reads
    SCOPED_TRACE(k);
    build({{"w", kRam, 0, {1, 1, 1, 1}}, {"kv", kNone, 0, {1}}});
    install_hooked(0);
    fail_at(k);
    if (k <= 4) {
      EXPECT_THROW(pause(), StoreError);
      EXPECT_EQ(places().back(), Place::kDevice) << "drops come last";
    } else {
      pause();
      note_dropped();
      EXPECT_THROW(resume(), StoreError);
    }
    fail_at(0);
    expect_sound("after the failure");
    if (k % 2 == 0) pause();
    expect_sound("finished");
    resume();
    expect_bytes("back");
    free_all();
    expect_nothing_left();
  }
}

TEST_F(StoreFaults, Invariant3_HostMemoryThatRunsOutMidwayOfASwap) {
  for (const uint64_t limit : {3 * kChunk, kUnlimited}) {  // with handles passed over, and with all handles made ahead
    for (int k = 1; k <= 6; ++k) {                         // three writes and three reads, in any order
      SCOPED_TRACE(k);
      build({{"out", kRam, 0, {1, 1, 1}}, {"in", kRam, 0, {1, 1, 1}}});
      install_hooked(k <= 3 ? 0 : 1);
      pause({"in"});
      fail_at(k <= 3 ? k : k - 3);
      core().budgets.device.set_limit(limit);
      EXPECT_THROW(swap({"out"}, {"in"}), StoreError);
      core().budgets.device.set_limit(kUnlimited);
      fail_at(0);
      expect_sound("after the failure");
      if (k % 2 == 0) {
        swap({"out"}, {"in"});
        EXPECT_EQ(resident_bytes("in"), 3 * kChunk);
        EXPECT_EQ(resident_bytes("out"), 0u);
      }
      resume();
      expect_bytes("back");
      free_all();
      expect_nothing_left();
      if (HasFailure()) return;
    }
  }
}

TEST_F(StoreFaults, Invariant7_ASwapWithoutHostMemoryLeavesBothAsTheyWere) {
  build({{"out", kRam, 0, {1, 1}}, {"in", kRam, 0, {1}}});
  pause({"in"});
  core().engines.trim();
  const std::vector<Place> before = places();
  // One chunk is stored. Two more need room, and each direction needs a ring.
  for (const uint64_t room : {uint64_t{0}, kChunk, 2 * kChunk, 2 * kChunk + policy::kLeastRingBytes}) {
    core().budgets.host.set_limit(kChunk + room);
    EXPECT_THROW(swap({"out"}, {"in"}), StoreError);
    core().engines.trim();
    EXPECT_EQ(places(), before);
    expect_sound("refused");
  }
  core().budgets.host.set_limit(3 * kChunk + 4 * policy::kLeastRingBytes + kMiB);
  swap({"out"}, {"in"});
  EXPECT_EQ(resident_bytes("out"), 0u);
  core().budgets.host.set_limit(kUnlimited);
  resume();
  expect_bytes("back");
}

TEST_F(StoreFaults, Invariant7_TheClaimedSpaceIsThereForItsOwnerAlone) {
  build({{"a", kRam, 0, {1, 1}}, {"b", kRam, 0, {1, 1}}});
  core().budgets.host.set_limit(3 * kChunk + 2 * policy::kLeastRingBytes + kMiB);
  auto first = claim(OperationKind::kPause, {"a"});
  EXPECT_THROW(claim(OperationKind::kPause, {"b"}), StoreError);
  core().budgets.host.set_limit(0);
  first->commit();
  first.reset();
  expect_sound("paused");
  EXPECT_EQ(resident_bytes("a"), 0u);
  EXPECT_THROW(pause({"b"}), StoreError);
  resume({"a"});
  expect_bytes("back");
}

}  // namespace
}  // namespace ebbtide::testing
