// Fault injection for the separation of shared handles before a trim.
#include <set>

#include "base/scope_exit.h"
#include "moves_faults.h"

namespace ebbtide::testing {
namespace {

class SeparateFaults : public MovesFaults {
 protected:
  void come_back() {
    pause();
    note_dropped();
    resume();
  }
  void separate() { run_at(OperationKind::kSeparate, {}, named()); }
  std::vector<CUdeviceptr> named() { return {items_[0].address}; }
  void trim() { run_at(OperationKind::kTrim, {}, named()); }
  size_t handle_count() {
    std::set<const Backing*> handles;
    for (const Item& item : items_) {
      for (const Chunk& chunk : core().registry.find(item.address)->chunks) handles.insert(chunk.backing.get());
    }
    return handles.size();
  }
  // Sweeps over an act that separates. Some of its failures leave chunks that are not mapped.
  void sweep_separation(const std::vector<ItemSpec>& items, const Act& act) {
    has_detached_ = false;
    sweep_all(sweep_of(items, [&] {
      const ScopeExit look([&]() noexcept { has_detached_ |= is_any_detached(); });
      act();
    }));
    EXPECT_TRUE(has_detached_);
  }

 private:
  Sweep sweep_of(const std::vector<ItemSpec>& items, const Act& act) {
    return {
        .items = items,
        .prepare = [this] { come_back(); },
        .act = act,
        .finishes = {[this] { separate(); }, [this] { resume(); }, [this] { pause(); }, [this] { trim(); },
                     [this] {
                       resume();
                       trim();
                     },
                     [this] { pause({}, BackupKind::kNone); }, [this] { claim(OperationKind::kPrepare)->commit(); }},
        .trimmed = [this] { return named(); }};
  }

  bool has_detached_ = false;
};

TEST_F(SeparateFaults, Invariant3_Separations) {
  const Act act = [&] { separate(); };
  sweep_separation({{"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}}, act);
  sweep_separation({{"w", kRetained, 0, {1, 2}}, {"w", kRetained, 0, {1}}}, act);
  sweep_separation({{"w", kPinned, 0, {1}}, {"w", kPinned, 0, {1}}}, act);
}

TEST_F(SeparateFaults, Invariant3_SeparationsOfSeveralHandles) {
  const std::vector<ItemSpec> items = {
      {"a", kRam, 0, {1}}, {"a", kRam, 0, {1}}, {"b", kRam, 0, {1}}, {"b", kRam, 0, {1, 1}}};
  sweep_separation(items, [&] { run_at(OperationKind::kSeparate, {}, {items_[0].address, items_[2].address}); });
}

TEST_F(SeparateFaults, Invariant3_TrimsThatSeparateFirst) {
  sweep_separation({{"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}}, [&] { trim(); });
}

// A driver that never has memory again, and one that has some the next time.
TEST_F(SeparateFaults, Invariant2_OutOfMemoryAtAnyCreationIsNoError) {
  for (const uint64_t times : {0, 1}) {
    for (uint64_t k = 1; k <= 3; ++k) {
      build({{"w", kRam, 0, {1}}, {"w", kRam, 0, {1, 1}}});
      come_back();
      sim().fail("cuMemCreate", k, kOutOfMemory, times);
      EXPECT_FALSE(fails([&] { separate(); }));
      sim().clear_failures();
      EXPECT_EQ(handle_count(), 1u);
      expect_bytes("still shared");
      separate();
      EXPECT_EQ(handle_count(), 3u);
      expect_bytes("separated");
      free_all();
      expect_nothing_left();
    }
  }
}

}  // namespace
}  // namespace ebbtide::testing
