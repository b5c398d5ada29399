// What an operation would move, asked without holding anything.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "core/operation/pending.h"
#include "core_fixture.h"

namespace ebbtide::testing {
namespace {

class PreviewTest : public CoreTest {
 protected:
  using Names = std::vector<std::string>;
};

TEST_F(PreviewTest, NamesTheTagsWhoseContentWouldMoveInTheOrderOfTheRequest) {
  alloc("a", kChunk);
  alloc("b", kChunk);
  alloc("b", kChunk);
  core().registry.tag("empty");
  EXPECT_EQ(preview(OperationKind::kPause, {"b", "empty", "a", "b"}), (Names{"b", "a"}));
  EXPECT_EQ(preview(OperationKind::kPause, {"never", "a"}, /*is_missing_ok=*/true), (Names{"a"}));
  EXPECT_EQ(preview(OperationKind::kResume), Names{});
  pause({"b"});
  EXPECT_EQ(preview(OperationKind::kPause), (Names{"a"}));
  EXPECT_EQ(preview(OperationKind::kResume), (Names{"b"}));
  EXPECT_EQ(preview(OperationKind::kTrim), (Names{"a", "b"})) << "the backups of memory that is away";
}

TEST_F(PreviewTest, LeavesEverythingAsItIs) {
  const CUdeviceptr address = alloc("w", kChunk);
  fill(address, kChunk, 1);
  const LeaseInfo first = open_lease(core(), "w", "a test");
  core().registry.leases.close(first.id);
  const Live before = Live::now();
  preview(OperationKind::kPause, {"w"});
  EXPECT_EQ(Live::now(), before);
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  const LeaseInfo second = open_lease(core(), "w", "a test");
  core().registry.leases.close(second.id);
  EXPECT_EQ(second.epoch, first.epoch) << "pools stay in use";
  core().capture_gate.begin_capture();  // would wait for a permit
  core().capture_gate.end_capture();
  EXPECT_TRUE(core().events.after(0).empty());
  deallocate(core(), address);
  EXPECT_EQ(Live::now().device_bytes, 0u) << "no operation holds it";
}

TEST_F(PreviewTest, RefusesWhatTheOperationRefuses) {
  const CUdeviceptr address = alloc("w", kChunk);
  EXPECT_THROW(preview(OperationKind::kPause, {"never"}), StateError);
  EXPECT_THROW(preview(OperationKind::kPause, {"a\nb"}), InvalidArgument);
  EXPECT_THROW(preview(OperationKind::kSwap, {"w"}), InvalidArgument);
  const LeaseInfo lease = open_lease(core(), "w", "a test");
  for (const OperationKind kind :
       {OperationKind::kPause, OperationKind::kTrim, OperationKind::kPromote, OperationKind::kDemote})
    EXPECT_THROW(preview(kind), StateError);
  EXPECT_EQ(preview(OperationKind::kResume), Names{});
  core().registry.leases.close(lease.id);
  core().capture_gate.begin_capture();
  EXPECT_THROW(preview(OperationKind::kResume), StateError);
  core().capture_gate.end_capture();
  EXPECT_EQ(preview(OperationKind::kTrim), (Names{"w"}));
  deallocate(core(), address);
}

TEST_F(PreviewTest, MemoryThatAFailureLeftBehindIsNoContent) {
  const CUdeviceptr address = alloc("w", 2 * kChunk);
  fill(address, 2 * kChunk, 1);
  sim().fail("cuMemRelease", 1, CUDA_ERROR_UNKNOWN, 1000);
  EXPECT_THROW(pause(), DriverError);
  sim().clear_failures();
  ASSERT_TRUE(core().registry.find(address)->has_stale_memory());
  EXPECT_EQ(preview(OperationKind::kPause), Names{});
  EXPECT_EQ(preview(OperationKind::kResume), (Names{"w"}));
  resume();
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
}

TEST_F(PreviewTest, WaitsForAnOperationThatHoldsTheTags) {
  const CUdeviceptr address = alloc("w", 2 * kChunk);
  alloc("other", kChunk);
  fill(address, 2 * kChunk, 1);
  pause();
  auto operation = claim(OperationKind::kResume, {"w"});
  EXPECT_EQ(preview(OperationKind::kResume, {"other"}), (Names{"other"})) << "no operation holds that one";
  core().registry.wait_for({.names = {"other"}, .addresses = {}, .only = nullptr});
  std::atomic<bool> is_over{false};
  std::thread asking([&] {
    EXPECT_EQ(preview(OperationKind::kResume, {"w"}), Names{});
    EXPECT_TRUE(is_over);
  });
  std::thread waiting([&] {
    core().registry.wait_for({});
    EXPECT_TRUE(is_over);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  is_over = true;
  operation->commit();
  asking.join();
  waiting.join();
  EXPECT_THROW(core().registry.wait_for({.names = {"never"}, .addresses = {}, .only = nullptr}), StateError);
}

}  // namespace
}  // namespace ebbtide::testing
