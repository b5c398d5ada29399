// Windows: views of backups that are retained while their memory is resident, and that the next pause refreshes.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "base/error.h"
#include "core/operation/backup_view.h"
#include "moves_faults.h"

namespace ebbtide::testing {
namespace {

class Windows : public CoreTest, public ::testing::WithParamInterface<BackupKind> {
 protected:
  CUdeviceptr alloc_retained(size_t blocks, const std::string& tag = "w") {
    return allocate(core(), core().registry.tag(tag), {.backup = GetParam(), .retain = true}, 0, blocks * kChunk);
  }
  std::optional<BackupView> window_on(CUdeviceptr address, size_t size_bytes) {
    return view_backup(core(), {address, size_bytes}, ViewKind::kWindow);
  }
  static CUdeviceptr bytes_of(const std::optional<BackupView>& view) {
    return view ? reinterpret_cast<CUdeviceptr>(view->bytes()) : 0;
  }
  void resume_without_retaining() {
    OperationRequest request;
    request.retain = false;
    Operation::claim(core(), OperationKind::kResume, std::move(request))->commit();
  }
};

TEST_P(Windows, OneAddressWhileItIsPausedResidentAndPausedAgain) {
  const CUdeviceptr address = alloc_retained(3);
  fill(address, 3 * kChunk, 1);
  pause();
  const CUdeviceptr seen = bytes_of(window_on(address, 3 * kChunk));
  ASSERT_NE(seen, 0u);
  resume();
  fill(address, 3 * kChunk, 2);
  {
    const auto window = window_on(address, 3 * kChunk);
    EXPECT_EQ(bytes_of(window), seen);
    EXPECT_TRUE(holds(seen, 3 * kChunk, 1)) << "as it was when it was paused";
    EXPECT_EQ(bytes_of(window_on(address + kChunk + 5, 7)), seen + kChunk + 5);
  }
  pause();
  EXPECT_EQ(bytes_of(window_on(address, 3 * kChunk)), seen);
  EXPECT_TRUE(holds(seen, 3 * kChunk, 2));
  resume();
  EXPECT_TRUE(holds(address, 3 * kChunk, 2));
  EXPECT_FALSE(view_backup(core(), {address, kChunk})) << "an ordinary view shows memory that is away";
}

TEST_P(Windows, TheNextPauseRefreshesWhatAWindowShows) {
  const CUdeviceptr address = alloc_retained(3);
  fill(address, 3 * kChunk, 1);
  pause();
  const auto window = window_on(address, 3 * kChunk);
  const CUdeviceptr seen = bytes_of(window);
  resume();
  EXPECT_TRUE(holds(seen, 3 * kChunk, 1));
  std::memset(reinterpret_cast<void*>(address), 0, kChunk);  // one value, which a pause without windows only notes
  fill(address + kChunk, 2 * kChunk, 2);
  pause();
  EXPECT_TRUE(is_zero(seen, kChunk));
  EXPECT_TRUE(holds(seen + kChunk, 2 * kChunk, 2));
  EXPECT_EQ(bytes_of(window_on(address, 3 * kChunk)), seen);
  resume();
  EXPECT_TRUE(is_zero(address, kChunk));
  EXPECT_TRUE(holds(address + kChunk, 2 * kChunk, 2));
}

TEST_P(Windows, BlocksOfOneValueAreShownWhileResident) {
  const CUdeviceptr address = alloc_retained(2);
  std::memset(reinterpret_cast<void*>(address), 7, 2 * kChunk);
  EXPECT_EQ(pause().totals().constant, 2 * kChunk);
  resume();
  const auto window = window_on(address + kChunk - 8, 16);
  ASSERT_TRUE(window);
  const std::array<unsigned char, 16> sevens = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
  EXPECT_EQ(std::memcmp(window->bytes(), sevens.data(), sevens.size()), 0);
}

TEST_P(Windows, WritesIntoTheWindowOfResidentMemoryNeverComeBack) {
  for (const bool is_dropped_first : {false, true}) {
    const CUdeviceptr address = alloc_retained(2);
    fill(address, 2 * kChunk, 1);
    pause();
    resume();
    auto window = window_on(address, 2 * kChunk);
    pause();  // makes no digests of blocks that the window may still write
    resume();
    fill(bytes_of(window), 2 * kChunk, 9);
    if (is_dropped_first) window.reset();
    EXPECT_EQ(pause().totals().copied, 2 * kChunk);
    resume();
    EXPECT_TRUE(holds(address, 2 * kChunk, 1));
    window.reset();
    deallocate(core(), address);
  }
}

TEST_P(Windows, WritesWhileItIsAwayComeBack) {
  const CUdeviceptr address = alloc_retained(2);
  fill(address, 2 * kChunk, 1);
  pause();
  const auto window = window_on(address, 2 * kChunk);
  fill(bytes_of(window), 2 * kChunk, 9);
  resume();
  EXPECT_TRUE(holds(address, 2 * kChunk, 9));
  EXPECT_EQ(bytes_of(window_on(address, 2 * kChunk)), bytes_of(window)) << "and the backup was retained";
}

TEST_P(Windows, OfNothingThatWasNotRetained) {
  const CUdeviceptr address = alloc_retained(2);
  EXPECT_FALSE(window_on(address, kChunk)) << "never paused";
  claim(OperationKind::kPrepare)->commit();
  EXPECT_FALSE(window_on(address, kChunk)) << "the backup has no content yet";
  fill(address, 2 * kChunk, 1);
  pause();
  const auto window = window_on(address, 2 * kChunk);
  resume_without_retaining();
  EXPECT_TRUE(holds(bytes_of(window), 2 * kChunk, 1)) << "the window keeps its bytes";
  EXPECT_FALSE(window_on(address, kChunk));
  fill(address, 2 * kChunk, 2);
  pause();
  EXPECT_TRUE(holds(bytes_of(window), 2 * kChunk, 1)) << "of a backup without an owner";
  resume();
  pause({}, BackupKind::kNone);
  EXPECT_FALSE(window_on(address, kChunk)) << "dropped";
  resume();
  EXPECT_FALSE(window_on(address, kChunk));
}

TEST_P(Windows, OutliveTheAllocation) {
  const CUdeviceptr address = alloc_retained(1);
  fill(address, kChunk, 1);
  pause();
  resume();
  auto window = window_on(address, kChunk);
  deallocate(core(), address);
  EXPECT_TRUE(holds(bytes_of(window), kChunk, 1));
  window.reset();
  expect_no_leak();
}

TEST_P(Windows, BesideAnOrdinaryViewTheyStayWithTheOldBackup) {
  const CUdeviceptr address = alloc_retained(1);
  fill(address, kChunk, 1);
  pause();
  const auto window = window_on(address, kChunk);
  const auto view = view_backup(core(), {address, kChunk});
  EXPECT_EQ(bytes_of(window), bytes_of(view));
  resume();
  EXPECT_FALSE(window_on(address, kChunk)) << "a view is of bytes that stay as they are: nothing is retained";
  fill(address, kChunk, 2);
  pause();
  EXPECT_TRUE(holds(bytes_of(view), kChunk, 1));
  EXPECT_TRUE(holds(bytes_of(window), kChunk, 1));
  EXPECT_NE(bytes_of(window_on(address, kChunk)), bytes_of(window));
}

TEST_P(Windows, OfWhatAPauseFailedToCopyThereIsNone) {
  core().rules.shared_handle_bytes = 0;
  const CUdeviceptr address = alloc_chunks("w", {.backup = GetParam(), .retain = true}, 0, {kChunk, kChunk});
  fill(address, 2 * kChunk, 1);
  pause();
  resume();
  fill(address, 2 * kChunk, 2);
  sim().fail("cuMemcpyDtoHAsync", 1, 999, 1);
  EXPECT_THROW(pause(), DriverError);
  sim().clear_failures();
  EXPECT_FALSE(window_on(address, 2 * kChunk));
  EXPECT_TRUE(holds(address, 2 * kChunk, 2));
  pause();
  const auto window = window_on(address, 2 * kChunk);
  EXPECT_TRUE(holds(bytes_of(window), 2 * kChunk, 2));
}

std::string name_of(const ::testing::TestParamInfo<BackupKind>& info) {
  return std::array{"none", "ram", "pinned", "disk"}[static_cast<size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Kinds, Windows, ::testing::Values(BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk),
                         name_of);

// With a window on everything that was retained, over the second pause and its resume.
class WindowFaults : public MovesFaults {
 protected:
  void look() {
    windows_.clear();
    make_second_cycle(0);
    for (const Item& item : items_) {
      auto window = view_backup(core(), {item.address, kChunk}, ViewKind::kWindow);
      if (window) windows_.push_back(std::move(*window));
    }
    EXPECT_EQ(windows_.size(), items_.size());
  }
  // No view is left when the world looks for leaks.
  Act and_let_go(const Act& act) {
    return [this, act] {
      act();
      windows_.clear();
    };
  }
  const Act pause_it_ = and_let_go([this] { pause_but_unused(); });
  const Act resume_all_ = and_let_go([this] { resume(); });

 private:
  std::vector<BackupView> windows_;
};

TEST_F(WindowFaults, Invariant3_APauseThatRefreshesThem) {
  const std::vector<ItemSpec> items = {{"w", kRetained, 0, {1, 2}}, {"w", kPinned, 1, {1}}};
  sweep_all({items, [&] { look(); }, pause_it_, {pause_it_, resume_all_}});
}

TEST_F(WindowFaults, Invariant3_AResumeUnderThem) {
  const Act paused_before = [&] {
    look();
    pause_but_unused();
  };
  const std::vector<ItemSpec> items = {{"w", kRetained, 0, {1, 2}}, {"w", kPinned, 1, {1}}};
  sweep_all({items, paused_before, resume_all_, {resume_all_, pause_it_}});
}

TEST_F(WindowFaults, Invariant3_OnDisk) {
  const DiskDirectory directory;
  sweep_all({{{"d", kRetainedDisk, 0, {1, 1}}}, [&] { look(); }, pause_it_, {pause_it_, resume_all_}});
  EXPECT_TRUE(directory.is_empty());
}

}  // namespace
}  // namespace ebbtide::testing
