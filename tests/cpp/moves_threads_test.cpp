// Swaps, asynchronous resumes, prepares and views in several threads at once. Besides their own expectations, these
// tests rely on ThreadSanitizer.
#include <atomic>
#include <chrono>

#include "core/operation/backup_view.h"
#include "core/operation/pending.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

class MovesThreads : public ThreadsTest {
 protected:
  void swap(const std::string& leaving, const std::string& returning) {
    OperationRequest request;
    request.tags.names = {leaving};
    request.resume_tags.names = {returning};
    Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  }
  CUdeviceptr make(const std::string& tag, const Policy& policy, int device, uint64_t seed) {
    const CUdeviceptr address = alloc_chunks(tag, policy, device, {kChunk, kChunk});
    fill(address, 2 * kChunk, seed);
    return address;
  }
};

TEST_F(MovesThreads, TwoPausesInTwoThreadsAndASwapLoseNothing) {
  ::setenv("EBBTIDE_COPY_THREADS", "2", 1);
  sim().set_async(EBBTIDE_SIM_RANDOM, 3);
  const Policy ram = {BackupKind::kRam};
  const std::vector<CUdeviceptr> all = {make("a", ram, 0, 0), make("b", {BackupKind::kRam, true}, 1, 1),
                                        make("c", {BackupKind::kPinned}, 0, 2), make("d", ram, 1, 3)};
  in_threads(4, [&](int thread) {
    for (int round = 0; round < 6; ++round) {
      switch (thread) {
        case 0:
          pause({"a"});
          resume({"a"});
          break;
        case 1:
          pause({"b", "c"});
          resume({"c"});
          break;
        case 2: swap(round % 2 == 0 ? "c" : "d", round % 2 == 0 ? "d" : "b"); break;
        default: swap("a", "c"); resume({"b", "a"});
      }
    }
  });
  resume();
  for (size_t index = 0; index < all.size(); ++index) {
    EXPECT_TRUE(holds(all[index], 2 * kChunk, index));
    deallocate(core(), all[index]);
  }
  core().engines.trim();
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  EXPECT_EQ(core().budgets.pinned.held_bytes(), 0u);
  EXPECT_EQ(Live::now().device_bytes, 0u);
}

TEST_F(MovesThreads, APauseThatComesInTheMiddleOfAnAsynchronousResumeWaitsForIt) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  fill(address, 5 * kChunk, 1);
  pause();
  sim().set_delay("ebbtide_deliver", kStand / 5);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  std::atomic<bool> was_over{false};
  std::thread pausing([&] {
    EXPECT_EQ(pause().totals().bytes, 5 * kChunk);
    was_over = pending->is_over() || pending->is_ready({address, 5 * kChunk});
  });
  EXPECT_EQ(pending->wait().totals().bytes, 5 * kChunk);
  pausing.join();
  sim().set_delay("ebbtide_deliver", 0);
  EXPECT_TRUE(was_over);
  EXPECT_EQ(resident_bytes("w"), 0u);
  EXPECT_TRUE(pending->is_ready({address, 5 * kChunk}));
  resume();
  EXPECT_TRUE(holds(address, 5 * kChunk, 1));
}

TEST_F(MovesThreads, AFailedAsynchronousResumeLetsWaitingPausesAndStreamsGoOn) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  fill(address, 5 * kChunk, 1);
  for (const bool has_begun : {false, true}) {
    pause();
    sim().set_delay("ebbtide_deliver", kStand / 2);
    sim().fail("cuStreamQuery", 1, 999, 1);
    const auto pending = PendingResume::start(claim(OperationKind::kResume));
    in_threads(4, [&](int thread) {
      if (thread == 0) pause();
      if (thread == 1) {
        EXPECT_THROW(pending->wait(), DriverError);
        EXPECT_TRUE(pending->is_over());
      }
      while (thread == 2 && !pending->is_ready({address, 5 * kChunk})) std::this_thread::yield();
      if (thread != 3 || !has_begun) return;
      // The simulated device works only while a thread waits for it.
      const ContextScope scope(0);
      const Stream stream = Stream::create();
      pending->stream_wait(0, stream.get(), {});
      stream.synchronize();
    });
    sim().clear_failures();
    sim().set_delay("ebbtide_deliver", 0);
    EXPECT_EQ(resident_bytes("w"), 0u);
    EXPECT_FALSE(is_partial("w"));
    resume();
    EXPECT_TRUE(holds(address, 5 * kChunk, 1));
  }
  deallocate(core(), address);
  EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
}

TEST_F(MovesThreads, Invariant12_MallocAndFreeNeverWaitForASwap) {
  const CUdeviceptr in = alloc_chunks("in", BackupKind::kRam, 0, kFive);
  const CUdeviceptr gone_in = alloc_chunks("in", BackupKind::kRam, 0, {kChunk});
  fill(in, 5 * kChunk, 2);
  pause({"in"});
  const CUdeviceptr out = alloc_chunks("out", BackupKind::kRam, 0, kFive);
  const CUdeviceptr gone_out = alloc_chunks("out", BackupKind::kRam, 0, {kChunk});
  fill(out, 5 * kChunk, 1);
  {
    Slow slow("cuMemcpyDtoHAsync", kStand, [&] { swap("out", "in"); });
    const CUdeviceptr fresh = alloc("out", kChunk);
    deallocate(core(), gone_in);
    deallocate(core(), gone_out);
    deallocate(core(), fresh);
    EXPECT_EQ(core().registry.find(gone_out), nullptr);
    EXPECT_TRUE(slow.is_running());
  }
  EXPECT_EQ(Live::now().reservations, 2u);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 6 * kChunk) << "what came in behind one handle goes as a whole";
  EXPECT_TRUE(holds(in, 5 * kChunk, 2));
  pause();
  EXPECT_EQ(Live::now().device_bytes, 0u);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  resume();
  EXPECT_TRUE(holds(in, 5 * kChunk, 2));
  EXPECT_TRUE(holds(out, 5 * kChunk, 1));
  deallocate(core(), in);
  deallocate(core(), out);
  expect_no_leak();
}

TEST_F(MovesThreads, PreparesAndViewsBesidePausesOfTheirTags) {
  const CUdeviceptr address = make("w", {BackupKind::kRam, true}, 0, 1);
  const CUdeviceptr other = make("v", {BackupKind::kPinned}, 1, 2);
  std::atomic<int> seen{0};
  in_threads(4, [&](int thread) {
    for (int round = 0; round < 12; ++round) {
      if (thread == 0) {
        pause();
        resume();
      } else if (thread == 1) {
        claim(OperationKind::kPrepare)->commit();
      } else if (const auto view = view_backup(core(), {thread == 2 ? address : other, 2 * kChunk})) {
        EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(view->bytes()), 2 * kChunk, static_cast<uint64_t>(thread - 1)));
        ++seen;
      }
      std::this_thread::yield();
    }
  });
  pause();
  EXPECT_TRUE(view_backup(core(), {address, 2 * kChunk}));
  resume();
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
  EXPECT_TRUE(holds(other, 2 * kChunk, 2));
  deallocate(core(), address);
  deallocate(core(), other);
  core().engines.trim();
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
