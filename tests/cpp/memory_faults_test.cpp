// Operations whose k-th `new` fails, as sweeps over the driver calls (sweep.h) make those fail: invariants 1 to 3 hold
// after each, the operation can be finished, and freeing everything leaves nothing.
#include "new_hook.h"

#if EBBTIDE_HAS_NEW_HOOK

#include "moves_faults.h"
#include "overflow_world.h"
#include "sweep.h"

namespace ebbtide::testing {
namespace {

class MemoryFaults : public MovesFaults {
 protected:
  void sweep_items(const std::vector<ItemSpec>& items, const Act& prepare, const Act& act) {
    sweep_new(
        [&] {
          core().engines.trim();
          build(items);
          prepare();
          note_dropped();
          core().engines.trim();
        },
        act,
        [&] {
          give_back_caches(core());
          expect_sound("after it");
        },
        [&] {
          note_dropped();
          resume();
          expect_bytes("back");
          free_all();
          expect_nothing_left();
        });
  }

  const std::vector<ItemSpec> few_items_ = {{"w", kRetained, 0, {1}}, {"w", kNone, 0, {1}}};
};

TEST_F(MemoryFaults, Invariant3_Pause) {
  sweep_items(few_items_, [] {}, [&] { pause(); });
}

TEST_F(MemoryFaults, Invariant3_Resume) {
  sweep_items(few_items_, [&] { pause(); }, [&] { resume(); });
}

TEST_F(MemoryFaults, Invariant3_ResumeInTheBackground) {
  sweep_items(few_items_, [&] { pause(); }, [&] { resume_pending(); });
}

TEST_F(MemoryFaults, Invariant3_Swap) {
  sweep_items(
      {{"out", kRam, 0, {1}}, {"in", kRetained, 0, {1}}}, [&] { pause({"in"}); }, [&] { swap({"out"}, {"in"}); });
}

TEST_F(MemoryFaults, Invariant3_TrimOfWhatSharesAHandle) {
  sweep_items(
      {{"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}},
      [&] {
        pause();
        resume();
      },
      [&] { claim(OperationKind::kSeparate)->commit(); });
}

TEST_F(MemoryFaults, Invariant3_Prepare) {
  sweep_items(few_items_, [] {}, [&] { claim(OperationKind::kPrepare)->commit(); });
}

TEST_F(MemoryFaults, Invariant3_CopyAhead) {
  sweep_items(
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
  sweep_items(
      few_items_, [] {},
      [&] {
        const CUdeviceptr address = alloc("other", kChunk);
        deallocate(core(), address);
      });
}

class OverflowMemoryFaults : public OverflowWorld {
 protected:
  void sweep_spilled(const Act& prepare, const Act& act) {
    sweep_new(
        [&] {
          start();
          core().host_pool.set_capacity(4 * kChunk);
          prepare();
          core().engines.trim();
        },
        act,
        [&] {
          give_back_caches(core());
          expect_sound("after it");
        },
        [&] {
          resume();
          expect_resident("all back");
          free_all();
          expect_nothing_left();
        });
  }
};

TEST_F(OverflowMemoryFaults, Invariant3_PromoteAndDemote) {
  const Act spill_some = [&] {
    spill("w", kSplitRam, kChunk, 2 * kChunk);
    spill("w", kSplitNone, kChunk, kChunk, 1);
  };
  sweep_spilled(spill_some, [&] { promote(); });
  sweep_spilled(spill_some, [&] { promote({}, kUnlimited, true); });
  sweep_spilled(spill_some, [&] { demote(); });
}

}  // namespace
}  // namespace ebbtide::testing

#endif
