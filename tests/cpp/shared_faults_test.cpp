// Fault injection for shared handles: everything has come back once before the operation under test. Allocations that
// share a handle are whole on one side or the other, whichever call fails.
#include "moves_faults.h"

namespace ebbtide::testing {
namespace {

class SharedFaults : public SwapFaults {
 protected:
  static std::vector<ItemSpec> neighbours() {
    return {{"w", kRam, 0, {1, 2}}, {"w", kRam, 0, {1}}, {"w", kRetained, 0, {1}}, {"w", kRetained, 0, {1}}};
  }
  void come_back() {
    pause();
    note_dropped();
    resume();
    expect_shared();
  }
  // Chunks that share a handle are in one state, also those of different allocations.
  void expect_shared() {
    std::map<const Backing*, Place> places;
    size_t chunks = 0;
    for (const Item& item : items_) {
      for (const Chunk& chunk : core().registry.find(item.address)->chunks) {
        const auto [found, is_new] = places.try_emplace(chunk.backing.get(), chunk.place.load());
        EXPECT_EQ(found->second, chunk.place.load()) << "what shares is in one place";
        ++chunks;
      }
    }
    EXPECT_LT(places.size(), chunks);
  }

  const Act pause_all_ = [this] { pause(); };
  const Act resume_all_ = [this] { resume(); };
  const Act come_back_ = [this] { come_back(); };
  const Act away_ = [this] {
    come_back();
    pause();
  };
};

TEST_F(SharedFaults, Invariant3_PausesOfWhatShares) {
  sweep_all({neighbours(), come_back_, pause_all_, {pause_all_, resume_all_}});
}

TEST_F(SharedFaults, Invariant3_ResumesOfWhatShared) {
  sweep_all({neighbours(), away_, resume_all_, {resume_all_, pause_all_}});
}

TEST_F(SharedFaults, Invariant3_BackgroundResumesOfWhatShared) {
  const Act wait_for_it = [&] { resume_pending(); };
  sweep_all({{{"w", kRam, 0, {1}}, {"w", kRam, 0, {1}}, {"w", kRetained, 1, {1, 1}}},
             away_,
             wait_for_it,
             {resume_all_, wait_for_it, pause_all_}});
}

TEST_F(SharedFaults, Invariant3_PausesOfDroppedAndOfPinnedMemory) {
  sweep_all({{{"n", kNone, 0, {1}}, {"n", kNone, 0, {1}}, {"p", kPinned, 1, {1}}, {"p", kPinned, 1, {1}}},
             come_back_,
             pause_all_,
             {pause_all_, resume_all_}});
}

TEST_F(SharedFaults, Invariant3_SwapsInWhichSharedHandlesChangeHands) {
  const std::vector<ItemSpec> items = {
      {"out", kRam, 0, {1}}, {"out", kRam, 0, {1}}, {"in", kRam, 0, {1}}, {"in", kRam, 0, {1}}};
  const Act prepare = [&] {
    core().budgets.device.set_limit(kUnlimited);
    come_back();
    pause({"in"});
  };
  const Act swap_it = [&] {
    core().budgets.device.set_limit(2 * kChunk);
    const auto unlimited = [&](const Core*) { core().budgets.device.set_limit(kUnlimited); };
    const std::unique_ptr<Core, decltype(unlimited)> end(&core(), unlimited);
    swap({"out"}, {"in"});
  };
  const Act swap_freely = [&] { swap({"out"}, {"in"}); };
  const Act undo = [&] {
    resume({"out"});
    pause({"in"});
  };
  sweep_all({items, prepare, swap_it, {swap_freely, undo, pause_all_}});
}

// Two allocations leave behind one handle, and three come back behind another.
TEST_F(SharedFaults, Invariant3_SwapsBetweenHandlesOfDifferentSizes) {
  const std::vector<ItemSpec> items = {
      {"out", kRam, 0, {1}}, {"out", kRam, 0, {1}}, {"in", kRam, 0, {1}}, {"in", kRam, 0, {1}}, {"in", kRam, 0, {1}}};
  const Act prepare = [&] {
    come_back();
    pause({"in"});
  };
  const Act swap_it = [&] { swap({"out"}, {"in"}); };
  sweep_all({items, prepare, swap_it, {swap_it, resume_all_, pause_all_}});
}

TEST_F(SharedFaults, Invariant3_TrimsOfAllThatShareAndTheirReturn) {
  const auto idle = [&] { return std::vector<CUdeviceptr>{items_[0].address, items_[1].address}; };
  const Act trim = [&] { run_at(OperationKind::kTrim, {"w"}, idle()); };
  const Act bring_back = [&] { run_at(OperationKind::kResume, {"w"}, idle()); };
  const Act trimmed = [&] {
    come_back();
    trim();
  };
  const std::vector<ItemSpec> items = {{"w", kRam, 0, {1}}, {"w", kRam, 0, {1, 1}}, {"w", kRetained, 0, {1}}};
  sweep_all({.items = items,
             .prepare = come_back_,
             .act = trim,
             .finishes = {trim, bring_back, pause_all_},
             .trimmed = idle});
  sweep_all({.items = items, .prepare = trimmed, .act = bring_back, .finishes = {trim, bring_back}, .trimmed = idle});
}

}  // namespace
}  // namespace ebbtide::testing
