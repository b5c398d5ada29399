// Many threads on the simulator: copies, mappings, captures and resets at the same time. Also run under
// ThreadSanitizer.
#include <atomic>
#include <thread>
#include <vector>

#include "sim_fixture.h"

namespace ebbtide::testing {
namespace {

class SimThreads : public SimTest {
 public:
  uint64_t queued_items() const { return live().queued_items; }

 protected:
  // Runs the bodies at the same time, each with the context current, and waits for them.
  void together(std::vector<std::function<void()>> bodies) {
    CUcontext context = nullptr;
    ASSERT_EQ(driver.f_cuCtxGetCurrent(&context), CUDA_SUCCESS);
    std::vector<std::thread> threads;
    for (auto& body : bodies) {
      threads.emplace_back([this, context, body = std::move(body)] {
        EXPECT_EQ(driver.f_cuCtxSetCurrent(context), CUDA_SUCCESS);
        body();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST_F(SimThreads, CopiersEachWithAStream) {
  constexpr int kRounds = 20;
  constexpr uint64_t kSize = 2 * kGranule;
  const auto copier = [&](char value) {
    return [this, value] {
      const CUdeviceptr address = mapped(kSize);
      const CUstream own = stream();
      std::vector<char> out(kSize, value), back(kSize);
      for (int round = 0; round < kRounds; ++round) {
        ASSERT_EQ(driver.f_cuMemcpyHtoDAsync(address, out.data(), kSize, own), CUDA_SUCCESS);
        ASSERT_EQ(driver.f_cuMemcpyDtoHAsync(back.data(), address, kSize, own), CUDA_SUCCESS);
        ASSERT_EQ(driver.f_cuStreamSynchronize(own), CUDA_SUCCESS);
        ASSERT_EQ(back, out);
      }
      ASSERT_EQ(driver.f_cuMemUnmap(address, kSize), CUDA_SUCCESS);
      ASSERT_EQ(driver.f_cuMemAddressFree(address, kSize), CUDA_SUCCESS);
    };
  };
  together({copier('a'), copier('b'), copier('c')});
  EXPECT_EQ(live().device_bytes, 0u);
}

TEST_F(SimThreads, CopiesMeetUnmapsWithoutACrash) {
  const CUdeviceptr address = reserve(kGranule);
  std::atomic<bool> is_over{false};
  const auto remapper = [&] {
    for (int round = 0; round < 200; ++round) {
      CUmemGenericAllocationHandle handle = 0;
      ASSERT_EQ(create(handle, kGranule), CUDA_SUCCESS);
      ASSERT_EQ(driver.f_cuMemMap(address, kGranule, 0, handle, 0), CUDA_SUCCESS);
      ASSERT_EQ(set_access(address, kGranule), CUDA_SUCCESS);
      ASSERT_EQ(driver.f_cuMemRelease(handle), CUDA_SUCCESS);
      ASSERT_EQ(driver.f_cuMemUnmap(address, kGranule), CUDA_SUCCESS);
    }
    is_over = true;
  };
  const auto copier = [&] {
    std::vector<char> host(kGranule, 'x');
    while (!is_over) {
      const CUresult result = driver.f_cuMemcpyHtoD(address, host.data(), host.size());
      ASSERT_TRUE(result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_VALUE) << result;
    }
  };
  together({remapper, copier, copier});
  EXPECT_EQ(live().device_bytes, 0u);
}

TEST_F(SimThreads, ManyWaitForOneStream) {
  const CUstream shared = stream();
  static std::atomic<int> ran;
  ran = 0;
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(driver.f_cuLaunchHostFunc(shared, [](void*) { ++ran; }, nullptr), CUDA_SUCCESS);
  }
  const auto waiter = [&] {
    EXPECT_EQ(driver.f_cuStreamSynchronize(shared), CUDA_SUCCESS);
    EXPECT_EQ(ran, 100);
  };
  const auto poller = [&] {
    while (driver.f_cuStreamQuery(shared) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
    EXPECT_EQ(ran, 100);
  };
  together({waiter, waiter, poller});
}

TEST_F(SimThreads, StreamsPassABatonBackAndForth) {
  constexpr int kRounds = 100;
  const CUstream streams[2] = {stream(), stream()};
  static std::vector<int> order;
  order.clear();
  for (int round = 0; round < kRounds; ++round) {
    const CUstream own = streams[round % 2], other = streams[(round + 1) % 2];
    const auto write_down = [](void* number) { order.push_back(static_cast<int>(reinterpret_cast<intptr_t>(number))); };
    ASSERT_EQ(driver.f_cuLaunchHostFunc(own, write_down, reinterpret_cast<void*>(static_cast<intptr_t>(round))),
              CUDA_SUCCESS);
    const CUevent passed = event();
    ASSERT_EQ(driver.f_cuEventRecord(passed, own), CUDA_SUCCESS);
    ASSERT_EQ(driver.f_cuStreamWaitEvent(other, passed, 0), CUDA_SUCCESS);
    ASSERT_EQ(driver.f_cuEventDestroy(passed), CUDA_SUCCESS);
  }
  const auto waiter = [&](CUstream which) { return [this, which] { driver.f_cuStreamSynchronize(which); }; };
  together({waiter(streams[0]), waiter(streams[1]), waiter(streams[0])});
  ASSERT_EQ(order.size(), static_cast<size_t>(kRounds));
  for (int round = 0; round < kRounds; ++round) EXPECT_EQ(order[static_cast<size_t>(round)], round);
}

// Invariant 9 rests on this.
TEST_F(SimThreads, SynchronisingTheContextBreaksAnotherThreadsCapture) {
  for (const auto mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    const CUstream own = stream();
    ASSERT_EQ(driver.f_cuStreamBeginCapture(own, mode), CUDA_SUCCESS);
    together({[&] { EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); }});
    CUgraph graph = nullptr;
    EXPECT_EQ(driver.f_cuStreamEndCapture(own, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_EQ(graph, nullptr);
    EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
  }
}

TEST_F(SimThreads, AResetDoesNotWaitForeverNorCrash) {
  const CUstream shared = stream();
  static std::atomic<int> started;
  started = 0;
  // The first item ends when the reset has emptied the queues. No other item may begin.
  const auto until_emptied = [](void* self) {
    ++started;
    while (static_cast<SimThreads*>(self)->queued_items() != 0) std::this_thread::yield();
  };
  for (int i = 0; i < 50; ++i) ASSERT_EQ(driver.f_cuLaunchHostFunc(shared, until_emptied, this), CUDA_SUCCESS);
  // No thread may come after the reset, because there is no context then.
  std::atomic<int> waiting = 0;
  const auto waiter = [&] {
    ++waiting;
    driver.f_cuStreamSynchronize(shared);
  };
  const auto resetter = [&] {
    while (started == 0 || waiting < 2) std::this_thread::yield();
    control.reset();
  };
  together({waiter, waiter, resetter});
  EXPECT_EQ(started, 1);
  EXPECT_EQ(queued_items(), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
