// Fault injection beyond a pause or resume of everything: swap, prepare, trim, retained, pinned and disk backups,
// asynchronous resumes (moves_faults.h).
#include "moves_faults.h"

namespace ebbtide::testing {
namespace {

TEST_F(SwapFaults, Invariant3_EqualSizesThatAreHandedOver) {
  sweep_swap({{"out", kRam, 0, {1, 1}}, {"in", kRam, 0, {1, 1}}}, {"out"}, {"in"}, 2 * kChunk);
}
TEST_F(SwapFaults, Invariant3_LessComesBackThanLeaves) {
  sweep_swap({{"out", kRam, 0, {1, 1, 1}}, {"in", kRetained, 0, {2}}}, {"out"}, {"in"}, 3 * kChunk);
}
TEST_F(SwapFaults, Invariant3_MoreComesBackThanLeaves) {
  sweep_swap({{"out", kRetained, 0, {1}}, {"in", kRam, 0, {3}}, {"in", kNone, 0, {1}}}, {"out"}, {"in"}, kUnlimited);
}
// The limit leaves no room for a margin, and no chunk fits into the difference.
TEST_F(SwapFaults, Invariant3_TheDifferenceIsHeldUntilAChunkFits) {
  sweep_swap({{"out", kRam, 0, {1, 1}}, {"in", kRam, 0, {3}}}, {"out"}, {"in"}, 3 * kChunk);
}
TEST_F(SwapFaults, Invariant3_SeveralTagsOnTwoDevices) {
  sweep_swap({{"a", kRam, 0, {1, 1}}, {"b", kNone, 1, {1}}, {"c", kPinned, 0, {1}}, {"d", kRam, 1, {1}}}, {"a", "b"},
             {"c", "d"}, 2 * kChunk);
}

TEST_F(MovesFaults, Invariant3_PrepareOfEveryStore) {
  const DiskDirectory directory;
  const Act prepare_it = [&] { claim(OperationKind::kPrepare)->commit(); };
  sweep_all({{{"r", kRam, 0, {1}}, {"p", kPinned, 1, {1}}, {"d", kDisk, 0, {1}}, {"n", kNone, 0, {1}}},
             [] {},
             [&] {
               prepare_it();
               pause();
             },
             {[&] { pause(); },
              [&] {
                prepare_it();
                pause();
              },
              [&] { resume(); }}});
  EXPECT_TRUE(directory.is_empty());
}

TEST_F(MovesFaults, Invariant3_TrimAndItsReturn) {
  const auto idle = [&] { return std::vector<CUdeviceptr>{items_[1].address, items_[2].address}; };
  const Act trim = [&] { run_at(OperationKind::kTrim, {"w"}, idle()); };
  const Act bring_back = [&] { run_at(OperationKind::kResume, {"w"}, idle()); };
  const std::vector<ItemSpec> items = {{"w", kRam, 0, {1}}, {"w", kRam, 0, {1, 1}}, {"w", kRetained, 1, {1}}};
  sweep_all({.items = items,
             .prepare = [] {},
             .act = trim,
             .finishes = {trim, bring_back, [&] { pause(); }},
             .trimmed = idle});
  sweep_all({.items = items, .prepare = trim, .act = bring_back, .finishes = {trim, bring_back}, .trimmed = idle});
}

// Blocks that are unchanged, constant, changed and unused.
TEST_F(MovesFaults, Invariant3_TheSecondPauseOfARetainedBackupAndItsResume) {
  const Act pause_it = [&] { pause_but_unused(); };
  const Act resume_all = [&] { resume(); };
  const std::vector<ItemSpec> items = {{"w", kRetained, 0, {1, 2, 1}}, {"w", kRam, 0, {1}}};
  const Act cycle_before = [&] {
    make_second_cycle(0);
    items_[1].is_unused[0] = true;
  };
  sweep_all({items, cycle_before, pause_it, {pause_it, resume_all}});
  core().rules.skip.clean = false;
  sweep_all({items, cycle_before, pause_it, {resume_all, pause_it}});
  core().rules.skip.clean = true;
  const Act paused_before = [&] {
    cycle_before();
    pause_it();
  };
  sweep_all({items, paused_before, resume_all, {resume_all, pause_it}});
}

TEST_F(MovesFaults, Invariant3_PinnedBackups) {
  const Act pause_all = [&] { pause(); };
  const Act resume_all = [&] { resume(); };
  const std::vector<ItemSpec> items = {{"w", kPinned, 0, {1, 1}}, {"w", kPinned, 1, {1}}};
  sweep_all({items, [] {}, pause_all, {pause_all, resume_all}});
  sweep_all({items, pause_all, resume_all, {resume_all, pause_all}});
}

// Its copies are queued before the scan is read. A retained backup in RAM is pinned by then.
TEST_F(MovesFaults, Invariant3_PinnedMemoryThatChangesEachTime) {
  const Act pause_all = [&] { pause(); };
  const Act resume_all = [&] { resume(); };
  const std::vector<ItemSpec> items = {{"w", kPinned, 0, {1, 1}}, {"w", kRetained, 1, {1}}};
  const auto change = [&](uint64_t seed) {
    for (size_t item = 0; item < items.size(); ++item) {
      for (size_t block = 0; block < items_[item].content.size(); ++block) write_block(item, block, seed + block);
    }
  };
  const Act cycles_before = [&] {
    for (const uint64_t seed : {1000, 2000}) {
      pause();
      resume();
      change(seed);
    }
    pause();
    resume();
    change(3000);
  };
  sweep_all({items, cycles_before, pause_all, {pause_all, resume_all}});
  const Act give_back = [&] {
    OperationRequest request;
    request.retain = false;
    Operation::claim(core(), OperationKind::kResume, std::move(request))->commit();
  };
  const Act paused_before = [&] {
    cycles_before();
    pause();
  };
  sweep_all({items, paused_before, give_back, {pause_all, resume_all, give_back}});
}

TEST_F(MovesFaults, Invariant3_BackupsOnDisk) {
  const DiskDirectory directory;
  const Act pause_all = [&] { pause(); };
  const Act resume_all = [&] { resume(); };
  const std::vector<ItemSpec> items = {{"w", kDisk, 0, {1}}, {"w", kRetainedDisk, 0, {1, 1}}};
  sweep_all({items, [] {}, pause_all, {pause_all, resume_all}});
  sweep_all({items, pause_all, resume_all, {resume_all, pause_all}});
  EXPECT_TRUE(directory.is_empty());
}

TEST_F(MovesFaults, Invariant3_AnAsynchronousResumeTellsItsErrorToEachWait) {
  const Act resume_all = [&] { resume(); };
  const Act pause_all = [&] { pause(); };
  const Act wait_for_it = [&] { resume_pending(); };
  sweep_all({{{"w", kRam, 0, {1, 1}}, {"w", kRetained, 1, {1}}, {"n", kNone, 0, {1}}},
             pause_all,
             wait_for_it,
             {resume_all, pause_all, wait_for_it}});
}

}  // namespace
}  // namespace ebbtide::testing
