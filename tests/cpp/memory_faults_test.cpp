// Operations whose k-th `new` fails, as sweeps over the driver calls (sweep.h) make those fail: invariants 1 to 3 hold
// after each, the operation can be finished, and freeing everything leaves nothing.
#include "new_hook.h"

#if EBBTIDE_HAS_NEW_HOOK

#include <algorithm>
#include <new>

#include "moves_faults.h"
#include "overflow_world.h"
#include "sweep.h"

namespace ebbtide::testing {
namespace {

// A `new` has no name that tells which fail alike: about 20 are tried.
size_t stride_of(size_t count) { return sweeps_all() ? 1 : std::max<size_t>(1, count / 20); }

// Whether the k-th `new` of act failed, and with it the operation.
bool fails_at(size_t k, const Act& act) {
  fail_new(k);
  bool has_failed = false;
  try {
    act();
  } catch (const std::exception&) {
    has_failed = true;
  }
  fail_new(0);
  return has_failed;
}

class MemoryFaults : public MovesFaults {
 protected:
  void sweep_new(const std::vector<ItemSpec>& items, const Act& prepare, const Act& act) {
    size_t failures = 0;
    size_t count = 1;
    for (size_t k = 0; k <= count && !HasFailure(); k += k == 0 ? 1 : stride_of(count)) {
      SCOPED_TRACE("new " + std::to_string(k) + " of " + std::to_string(count));
      core().engines.trim();
      build(items);
      prepare();
      note_dropped();
      core().engines.trim();
      if (k == 0) {
        count = count_new(act);
      } else {
        failures += fails_at(k, act) ? 1 : 0;
      }
      give_back_caches(core());
      expect_sound("after it");
      ASSERT_NO_THROW(act());
      note_dropped();
      resume();
      expect_bytes("back");
      free_all();
      expect_nothing_left();
    }
    EXPECT_GT(failures, count / stride_of(count) / 4);
  }

  const std::vector<ItemSpec> few_items_ = {{"w", kRetained, 0, {1}}, {"w", kNone, 0, {1}}};
};

TEST_F(MemoryFaults, Invariant3_Pause) {
  sweep_new(few_items_, [] {}, [&] { pause(); });
}

TEST_F(MemoryFaults, Invariant3_Resume) {
  sweep_new(few_items_, [&] { pause(); }, [&] { resume(); });
}

TEST_F(MemoryFaults, Invariant3_ResumeInTheBackground) {
  sweep_new(few_items_, [&] { pause(); }, [&] { resume_pending(); });
}

TEST_F(MemoryFaults, Invariant3_Swap) {
  sweep_new({{"out", kRam, 0, {1}}, {"in", kRetained, 0, {1}}}, [&] { pause({"in"}); }, [&] { swap({"out"}, {"in"}); });
}

TEST_F(MemoryFaults, Invariant3_TrimOfWhatSharesAHandle) {
  sweep_new(
      {{"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}},
      [&] {
        pause();
        resume();
      },
      [&] { claim(OperationKind::kSeparate)->commit(); });
}

TEST_F(MemoryFaults, Invariant3_Prepare) {
  sweep_new(few_items_, [] {}, [&] { claim(OperationKind::kPrepare)->commit(); });
}

TEST_F(MemoryFaults, Invariant3_CopyAhead) {
  sweep_new(
      few_items_, [] {},
      [&] {
        AheadProgress progress;
        OperationRequest request;
        request.tags.names = {"w"};
        request.ahead = &progress;
        Operation::claim(core(), OperationKind::kCopyAhead, std::move(request))->commit();
      });
}

TEST_F(MemoryFaults, Invariant3_AllocationsAndFrees) {
  sweep_new(
      few_items_, [] {},
      [&] {
        const CUdeviceptr address = alloc("other", kChunk);
        deallocate(core(), address);
      });
}

class OverflowMemoryFaults : public OverflowWorld {
 protected:
  void sweep_new(const Act& prepare, const Act& act) {
    size_t failures = 0;
    size_t count = 1;
    for (size_t k = 0; k <= count && !HasFailure(); k += k == 0 ? 1 : stride_of(count)) {
      SCOPED_TRACE("new " + std::to_string(k) + " of " + std::to_string(count));
      start();
      core().host_pool.set_capacity(4 * kChunk);
      prepare();
      core().engines.trim();
      if (k == 0) {
        count = count_new(act);
      } else {
        failures += fails_at(k, act) ? 1 : 0;
      }
      give_back_caches(core());
      expect_sound("after it");
      ASSERT_NO_THROW(act());
      resume();
      expect_resident("all back");
      free_all();
      expect_nothing_left();
    }
    EXPECT_GT(failures, count / stride_of(count) / 4);
  }
};

TEST_F(OverflowMemoryFaults, Invariant3_PromoteAndDemote) {
  const Act spill_some = [&] {
    spill("w", kSplitRam, kChunk, 2 * kChunk);
    spill("w", kSplitNone, kChunk, kChunk, 1);
  };
  sweep_new(spill_some, [&] { promote(); });
  sweep_new(spill_some, [&] { promote({}, kUnlimited, true); });
  sweep_new(spill_some, [&] { demote(); });
}

}  // namespace
}  // namespace ebbtide::testing

#endif
