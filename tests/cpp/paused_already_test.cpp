// Memory that a pause has left in place on the host is paused: no later operation but a resume selects it.
#include "base/error.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

class PausedAlreadyTest : public OverflowWorld {
 protected:
  bool is_paused(size_t index) { return find(index).is_paused.load(); }
  bool is_any_away(const std::string& tag) { return core().registry.is_any_away(core().registry.tag(tag)); }
};

TEST_F(PausedAlreadyTest, Invariant2_NoLaterPauseForgetsWhatWasLeftOnTheHost) {
  const size_t item = spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
  const size_t whole = spill("w", kWholeRam, 0, 2 * kChunk);
  pause();
  EXPECT_TRUE(is_paused(item));
  EXPECT_TRUE(is_paused(whole));
  for (const auto backup : {BackupKind::kNone, BackupKind::kDisk, BackupKind::kPinned, BackupKind::kRam}) {
    const Report again = pause({"w"}, backup);
    EXPECT_TRUE(again.rows.empty());
    EXPECT_EQ(host_bytes(item), 3 * kChunk);
    EXPECT_EQ(host_bytes(whole), 2 * kChunk);
    expect_sound("paused again");
  }
  resume();
  EXPECT_FALSE(is_paused(item));
  EXPECT_FALSE(is_paused(whole));
  expect_resident("resumed");
  pause({"w"}, BackupKind::kNone);
  EXPECT_EQ(host_bytes(item) + host_bytes(whole), 0u) << "memory that is not paused is dropped";
}

TEST_F(PausedAlreadyTest, Invariant2_NoPromotionAndNoSwapTakesWhatWasLeftOnTheHost) {
  const size_t item = spill("w", kSplitRam, kChunk, 2 * kChunk);
  const size_t other = spill("v", kSplitRam, kChunk, kChunk);
  pause();
  EXPECT_EQ(promote({"w"}).totals().bytes, 0u);
  EXPECT_EQ(host_bytes(item), 2 * kChunk);
  EXPECT_EQ(device_bytes(item), 0u);
  OperationRequest request;
  request.tags.names = {"w"};
  request.resume_tags.names = {"v"};
  request.backup = BackupKind::kNone;
  EXPECT_EQ(Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit().front().totals().bytes, 0u);
  EXPECT_EQ(host_bytes(item), 2 * kChunk);
  EXPECT_FALSE(is_paused(other));
  resume();
  expect_resident("resumed");
  EXPECT_EQ(promote({"w"}).totals().bytes, 2 * kChunk);
}

TEST_F(PausedAlreadyTest, ATagWhoseMemoryLiesOnTheHostAloneIsPausedUntilItIsResumed) {
  const size_t item = spill("w", kWholeRam, 0, 2 * kChunk);
  pause();
  EXPECT_TRUE(is_any_away("w"));
  resume();
  EXPECT_FALSE(is_any_away("w"));
  pause();
  deallocate(core(), items_[item].address);
  items_.clear();
  EXPECT_FALSE(is_any_away("w"));
  expect_nothing_left();
}

TEST_F(PausedAlreadyTest, ANewAllocationInAPausedTagIsNotPausedYet) {
  const size_t first = spill("w", kSplitRam, kChunk, kChunk);
  pause();
  const size_t second = spill("w", kSplitRam, kChunk, kChunk);
  EXPECT_EQ(pause({"w"}, BackupKind::kNone).totals().bytes, kChunk);
  EXPECT_EQ(host_bytes(second), 0u);
  EXPECT_EQ(host_bytes(first), kChunk);
  note_dropped();
  resume();
  expect_resident("resumed");
}

TEST_F(PausedAlreadyTest, Invariant3_AClaimThatIsAbandonedPausesAndResumesNothing) {
  const size_t item = spill("w", kWholeRam, 0, kChunk);
  claim(OperationKind::kPause)->abandon();
  EXPECT_FALSE(is_paused(item));
  pause();
  claim(OperationKind::kResume)->abandon();
  EXPECT_TRUE(is_paused(item));
}

// Every driver call of the pause and of the resume fails once. A pause without a backup must not lose the memory that
// has already left.
TEST_F(PausedAlreadyTest, Invariant3_AfterAFailureWhatLeftWholeIsPaused) {
  for (const bool is_resume : {false, true}) {
    size_t failures = 0;
    for (uint64_t k = 1;; ++k) {
      SCOPED_TRACE((is_resume ? "resume, call " : "pause, call ") + std::to_string(k));
      start();
      const size_t item = spill("w", kSplitRam, kChunk, 2 * kChunk);
      if (is_resume) pause();
      core().engines.trim();
      sim().clear_log();
      sim().fail(nullptr, k, 999, 1);
      try {
        is_resume ? resume() : pause();
      } catch (const Error&) {
        ++failures;
      }
      const bool was_reached = sim().calls(nullptr) >= k;
      sim().clear_failures();
      give_back_caches(core());
      EXPECT_TRUE(!is_paused(item) || device_bytes(item) == 0);
      if (device_bytes(item) == 0) {
        EXPECT_TRUE(is_paused(item));
        pause({"w"}, BackupKind::kNone);
        EXPECT_EQ(host_bytes(item), 2 * kChunk);
        expect_sound("paused again");
      }
      resume();
      expect_resident("resumed");
      if (HasFailure()) return;
      free_all();
      expect_nothing_left();
      if (!was_reached) break;
    }
    EXPECT_GT(failures, 3u);
  }
}

}  // namespace
}  // namespace ebbtide::testing
