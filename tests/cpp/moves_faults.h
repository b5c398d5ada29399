#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "core/operation/pending.h"
#include "moves_world.h"
#include "store/delivery_board.h"
#include "sweep.h"

// Sweeps over driver calls of any operation (sweep.h). After each failure invariants 1 to 3 hold, the tags can be
// finished in any way, and freeing them leaves nothing.
namespace ebbtide::testing {

inline constexpr Policy kRam = {BackupKind::kRam};
inline constexpr Policy kRetained = {BackupKind::kRam, true};
inline constexpr Policy kNone = {BackupKind::kNone};
inline constexpr Policy kPinned = {BackupKind::kPinned};
inline constexpr Policy kDisk = {BackupKind::kDisk};
inline constexpr Policy kRetainedDisk = {BackupKind::kDisk, true};

class MovesFaults : public MovesWorld {
 protected:
  struct Sweep {
    std::vector<ItemSpec> items;
    Act prepare;
    Act act;
    std::vector<Act> finishes;                                    // ways to finish what failed, used in turn
    std::function<std::vector<CUdeviceptr>()> trimmed = nullptr;  // what else must be named to come back
  };

  // The call that a rule made fail.
  static std::string failed_call(int code) {
    std::string text(sim().log(nullptr, 0) + 1, '\0');
    sim().log(text.data(), text.size());
    std::istringstream lines(text);
    const std::string ending = ") = " + std::to_string(code);
    for (std::string line; std::getline(lines, line);) {
      if (line.ends_with(ending)) return line.substr(0, line.find('('));
    }
    return "";
  }

  void bring_all_back(const Sweep& sweep) {
    note_dropped();
    resume();
    if (sweep.trimmed) run_at(OperationKind::kResume, {}, sweep.trimmed());
  }

  void try_once(const Sweep& sweep, const CallFailure& failure) {
    SCOPED_TRACE(failure.text());
    core().engines.trim();
    // A delivery that could not be waited for loses its board. So the boards that this try uses are made before.
    {
      const DeliveryBoard boards[] = {DeliveryBoard(0), DeliveryBoard(1)};
    }
    const Live before = Live::now();
    build(sweep.items);
    sweep.prepare();
    note_dropped();
    core().engines.trim();
    const std::vector<Place> places_before = places();
    sim().clear_log();
    failure.inject();
    const bool has_failed = fails(sweep.act);
    sim().clear_failures();
    const std::string call = failed_call(failure.code);
    failures_ += has_failed ? 1 : 0;
    give_back_caches(core());
    expect_sound("after the failure");
    if (places() == places_before && !is_any_detached()) {
      for (const Item& item : items_) EXPECT_FALSE(is_partial(item.spec.tag)) << item.spec.tag;
    }
    if (HasFailure()) return;
    ASSERT_FALSE(fails(sweep.finishes[failure.k % sweep.finishes.size()])) << "finished";
    bring_all_back(sweep);
    if (failure.k % 4 == 1) {
      // The digests of the stored bytes must be right as well.
      pause();
      bring_all_back(sweep);
    }
    expect_bytes("back");
    free_all();
    expect_nothing_left();
    // Streams and events that cannot be destroyed are lost; memory never is.
    if (failure.times != 0 && call != "cuStreamDestroy" && call != "cuEventDestroy") {
      EXPECT_EQ(Live::now(), before);
    }
  }

  void sweep_all(const Sweep& sweep) {
    build(sweep.items);
    sweep.prepare();
    expect_sound("prepared");
    core().engines.trim();
    sim().clear_log();
    sweep.act();
    const std::vector<std::string> calls = logged_calls();
    expect_sound("whole");
    bring_all_back(sweep);
    expect_bytes("whole and back");
    free_all();
    expect_nothing_left();
    ASSERT_GT(calls.size(), 5u);
    failures_ = 0;
    const std::vector<CallFailure> failures = failures_of(calls);
    for (const CallFailure& failure : failures) {
      try_once(sweep, failure);
      if (HasFailure()) return;
    }
    EXPECT_GT(failures_, failures.size() / 4);
  }

  // A thread that waits for a resume gets its error.
  void resume_pending() {
    const auto pending = PendingResume::start(claim(OperationKind::kResume));
    pending->wait();
  }

  // A second cycle. Of each four blocks the first is unchanged, the second becomes one repeated value, the third
  // changes, and the fourth is no longer one repeated value.
  void make_second_cycle(size_t item) {
    const size_t blocks = items_[item].content.size();
    for (size_t block = 3; block < blocks; block += 4) write_block(item, block, 7);
    pause();
    resume();
    for (size_t block = 1; block < blocks; block += 4) write_block(item, block, 9);
    for (size_t block = 2; block < blocks; block += 4) write_block(item, block, 500 + block);
    for (size_t block = 3; block < blocks; block += 4) write_block(item, block, 600 + block);
  }

 private:
  size_t failures_ = 0;
};

class SwapFaults : public MovesFaults {
 protected:
  // Finishes a swap in both ways, and brings both sides back.
  void sweep_swap(const std::vector<ItemSpec>& items, const std::vector<std::string>& leaving,
                  const std::vector<std::string>& returning, uint64_t limit_bytes) {
    const auto pause_first = [&, returning] {
      core().budgets.device.set_limit(kUnlimited);
      pause(returning);
    };
    sweep_all({items,
               pause_first,
               [&, leaving, returning, limit_bytes] {
                 core().budgets.device.set_limit(limit_bytes);
                 const auto unlimited = [&](const Core*) { core().budgets.device.set_limit(kUnlimited); };
                 const std::unique_ptr<Core, decltype(unlimited)> end(&core(), unlimited);
                 swap(leaving, returning);
               },
               {[&, leaving, returning] { swap(leaving, returning); },
                [&, leaving, returning] {
                  pause(leaving);
                  resume(returning);
                },
                [&, leaving, returning] {
                  resume(leaving);
                  pause(returning);
                },
                [&] { pause(); }}});
  }
};

}  // namespace ebbtide::testing
