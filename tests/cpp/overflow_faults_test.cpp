// Fault injection for spilled memory: driver calls of every operation fail (sweep.h). After each failure invariants 1
// to 3 hold, the operation can be finished in any way, and freeing everything leaves nothing.
#include "base/error.h"
#include "base/scope_exit.h"
#include "overflow_world.h"
#include "sweep.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

class OverflowFaults : public OverflowWorld {
 protected:
  void try_once(const Act& prepare, const Act& act, const Act& finish, const CallFailure& failure) {
    SCOPED_TRACE(failure.text());
    start();
    core().host_pool.set_capacity(4 * kChunk);
    prepare();
    note_dropped();
    core().engines.trim();
    failure.inject();
    failures_ += fails(act) ? 1 : 0;
    sim().clear_failures();
    give_back_caches(core());
    expect_sound("after the failure");
    if (HasFailure()) return;
    ASSERT_FALSE(fails(finish));
    expect_sound("finished");
    resume();
    for (size_t index = 0; index < items_.size(); ++index) {
      if (find(index).is_trimmed) resume_at({}, {items_[index].address});
    }
    expect_resident("all back");
    free_all();
    expect_nothing_left();
  }

  // What failed is finished by act or by one of the others, in turn.
  void sweep(const Act& prepare, const Act& act, std::vector<Act> finishes = {}) {
    finishes.push_back(act);
    start();
    core().host_pool.set_capacity(4 * kChunk);
    prepare();
    note_dropped();
    core().engines.trim();
    sim().clear_log();
    act();
    const std::vector<std::string> calls = logged_calls();
    expect_sound("whole");
    ASSERT_GT(calls.size(), 3u);
    failures_ = 0;
    const std::vector<CallFailure> failures = failures_of(calls);
    for (const CallFailure& failure : failures) {
      try_once(prepare, act, finishes[failure.k % finishes.size()], failure);
      if (HasFailure()) return;
    }
    EXPECT_GE(failures_, failures.size() / 4);
  }

  void make_three() {
    spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
    spill("w", kSplitNone, kChunk, 2 * kChunk, 1);
    spill("w", kSplitRam, 0, kChunk);
  }

  size_t failures_ = 0;
};

TEST_F(OverflowFaults, Invariant3_AnAllocationThatSpillsLeavesNothingWhereItFails) {
  for (const Policy& policy : {kSplitRam, kSplitNone, kWholeRam}) {
    for (const bool is_pool_full : {false, true}) {
      const Act one_alloc = [&] {
        core().budgets.device.set_limit(kChunk);
        const CUdeviceptr address = alloc_with("w", policy, 4 * kChunk);
        EXPECT_TRUE(is_zero(address, 4 * kChunk));
        deallocate(core(), address);
      };
      const Act prepare = [&] {
        if (is_pool_full) one_alloc();
      };
      sweep(prepare, one_alloc);
    }
  }
}

// 64 MiB, the last 2 of which are for small allocations.
TEST_F(OverflowFaults, Invariant3_ASmallAllocationBesideALargeOneThatSpills) {
  for (const Policy& policy : {kSplitRam, kWholeRam}) {
    const Act both = [&] {
      core().rules.overflow.reserve_bytes = 4 * kMiB;
      core().budgets.device.set_limit(64 * kMiB);
      const CUdeviceptr large = alloc_with("w", policy, 66 * kMiB);
      const ScopeExit free_large([&]() noexcept { deallocate(core(), large); });
      const CUdeviceptr small = alloc_with("w", policy, 2 * kMiB);
      deallocate(core(), small);
    };
    sweep([] {}, both);
  }
}

TEST_F(OverflowFaults, Invariant3_AFreeThatFailsIsDoneLater) {
  const Act free_one = [&] {
    if (items_.size() < 3) return;
    const CUdeviceptr address = items_.back().address;
    items_.pop_back();
    deallocate(core(), address);
  };
  const Act make = [&] {
    spill("w", kSplitRam, 0, kChunk);
    spill("w", kSplitRam, 0, kChunk, 1);
    spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
  };
  start();
  core().host_pool.set_capacity(4 * kChunk);
  make();
  sim().clear_log();
  free_one();
  for (const CallFailure& failure : failures_of(logged_calls())) {
    if (HasFailure()) return;
    SCOPED_TRACE(failure.text());
    start();
    core().host_pool.set_capacity(4 * kChunk);
    make();
    failure.inject();
    EXPECT_NO_THROW(free_one());
    sim().clear_failures();
    // It counts until it is released.
    if (core().deferred_frees.count() > 0) {
      EXPECT_GE(core().budgets.host.held_bytes(), spilled_bytes() + kChunk);
    }
    give_back_caches(core());
    EXPECT_EQ(deferred_undos::count() + core().deferred_frees.count(), 0u);
    expect_sound("given back");
    free_all();
    expect_nothing_left();
  }
}

TEST_F(OverflowFaults, Invariant3_PauseOfWhatSpilled) {
  sweep([&] { make_three(); }, [&] { pause(); });
}

TEST_F(OverflowFaults, Invariant3_PauseThatDropsWhatSpilled) {
  sweep([&] { make_three(); }, [&] { pause({}, BackupKind::kNone); });
}

TEST_F(OverflowFaults, Invariant3_ResumeOfWhatWasDropped) {
  sweep(
      [&] {
        make_three();
        pause({}, BackupKind::kNone);
      },
      [&] { resume(); });
}

TEST_F(OverflowFaults, Invariant3_Promote) {
  sweep([&] { make_three(); }, [&] { promote(); }, {[&] { pause(); }, [&] { pause({}, BackupKind::kNone); }});
}

TEST_F(OverflowFaults, Invariant3_Demote) {
  const Act make_some = [&] {
    make("w", kSplitRam, {1, 2});
    make("w", {BackupKind::kRam}, {1}, 1);
    spill("v", kSplitNone, kChunk, kChunk);
  };
  sweep(make_some, [&] { demote(); }, {[&] { pause(); }, [&] { promote(); }, [&] { pause({}, BackupKind::kNone); }});
}

// The host memory comes from the pool, and the chunks share a handle.
TEST_F(OverflowFaults, Invariant3_DemoteOfWhatSharesAndItsPromotion) {
  const Act make_shared = [&] {
    make("w", {BackupKind::kRam}, {1, 1});
    make("w", {BackupKind::kRam}, {1});
    make("w", {BackupKind::kRam, true}, {1});
    demote();
    promote();
    pause();
    resume();
  };
  const Act round_trip = [&] {
    demote();
    promote();
  };
  sweep(make_shared, round_trip, {[&] { demote(); }, [&] { pause(); }});
}

// Of two chunks, one has a block that changes before it goes back.
TEST_F(OverflowFaults, Invariant3_MovesThatKeepTheHostMemory) {
  const Act promote_all = [&] { promote({}, kUnlimited, true); };
  const Act demote_all = [&] { demote(); };
  const Act make_demoted = [&] {
    make("w", {BackupKind::kRam}, {1, 2});
    demote();
  };
  const Act make_kept = [&] {
    make("w", {BackupKind::kRam}, {1, 2});
    fill(items_[0].address + kChunk, kChunk, 77);
    demote();
    promote_all();
    fill_item(0);
  };
  sweep(make_demoted, promote_all, {demote_all});
  sweep(make_kept, demote_all, {promote_all});
}

TEST_F(OverflowFaults, Invariant3_OperationsOnWhatWasDemoted) {
  if (is_hip()) GTEST_SKIP() << "there is no overflow";
  const Act make_demoted = [&] {
    make("w", {BackupKind::kRam}, {1, 1});
    make("w", {BackupKind::kPinned}, {1}, 1);
    make("w", {BackupKind::kNone}, {1, 1});
    demote({}, 4 * kChunk);
  };
  sweep(make_demoted, [&] { pause(); });
  sweep(make_demoted, [&] { promote(); });
  sweep(
      [&] {
        make_demoted();
        pause();
      },
      [&] { resume(); });
}

TEST_F(OverflowFaults, Invariant3_TrimOfWhatSpilledAndItsReturn) {
  const Act trim_all = [&] {
    std::vector<CUdeviceptr> addresses;
    for (const Item& item : items_) addresses.push_back(item.address);
    trim({"w"}, addresses);
  };
  sweep([&] { make_three(); }, trim_all);
}

// Two calls in a row fail: the mapping of the new memory, and the repeated mapping of the old.
TEST_F(OverflowFaults, Invariant3_AChunkThatCouldNotBeMappedAgainIsWholeAndComesBack) {
  for (const bool is_freed : {false, true}) {
    start();
    const size_t item = spill("w", kSplitRam, kChunk, kChunk);
    sim().fail("cuMemMap", 2, kOther, 2);  // the first call maps the spare range
    EXPECT_THROW(promote(), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(find(item).chunks.back().is_detached.load());
    EXPECT_TRUE(core().registry.is_away(items_[item].address + kChunk, 1));
    expect_sound("detached");
    if (is_freed) {
      free_all();
      expect_nothing_left();
      continue;
    }
    EXPECT_EQ(pause().totals().bytes, 2 * kChunk);
    EXPECT_EQ(resume().totals().bytes, 2 * kChunk);
    EXPECT_EQ(host_bytes(item), 0u);
    expect_resident("mapped again");
  }
}

}  // namespace
}  // namespace ebbtide::testing
