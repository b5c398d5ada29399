// Streams of the simulator that wait for a number in memory: waiting for them, releasing them, and destroying them.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "sim_fixture.h"

namespace ebbtide::testing {
namespace {

using namespace std::chrono_literals;

class SimValues : public SimTest {
 protected:
  uint32_t* pinned() {
    void* bytes = nullptr;
    EXPECT_EQ(driver.f_cuMemHostAlloc(&bytes, 4096, 0), CUDA_SUCCESS);
    auto* number = static_cast<uint32_t*>(bytes);
    *number = 0;
    return number;
  }
  static CUdeviceptr at(const uint32_t* number) { return reinterpret_cast<CUdeviceptr>(number); }
  CUresult wait(CUstream queue, const uint32_t* number, uint32_t value, unsigned flags = CU_STREAM_WAIT_VALUE_GEQ) {
    return driver.f_cuStreamWaitValue32(queue, at(number), value, flags);
  }
  CUresult write(CUstream queue, const uint32_t* number, uint32_t value) {
    return driver.f_cuStreamWriteValue32(queue, at(number), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  static void store(uint32_t* number, uint32_t value) { std::atomic_ref(*number).store(value); }
  CUresult query(CUstream queue) { return driver.f_cuStreamQuery(queue); }
  CUresult synchronize(CUstream queue) { return driver.f_cuStreamSynchronize(queue); }
};

TEST_F(SimValues, APollNeverBlocks) {
  const CUstream queue = stream();
  uint32_t* number = pinned();
  ASSERT_EQ(wait(queue, number, 1), CUDA_SUCCESS);
  for (int turn = 0; turn < 5; ++turn) EXPECT_EQ(query(queue), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(live().queued_items, 1u);
  store(number, 1);
  EXPECT_EQ(query(queue), CUDA_ERROR_NOT_READY) << "this poll runs it";
  EXPECT_EQ(query(queue), CUDA_SUCCESS);
}

struct Comparison {
  unsigned flags;
  uint32_t value, unmet, met;
};

TEST_F(SimValues, EveryComparison) {
  uint32_t* number = pinned();
  for (const Comparison& each : {Comparison{CU_STREAM_WAIT_VALUE_GEQ, 5, 4, 5},
                                 {CU_STREAM_WAIT_VALUE_GEQ, 5, 4, 6},
                                 {CU_STREAM_WAIT_VALUE_GEQ, 1, 0xffffffff, 2},
                                 {CU_STREAM_WAIT_VALUE_GEQ, 0xffffffff, 7, 0xffffffff},
                                 {CU_STREAM_WAIT_VALUE_EQ, 5, 6, 5},
                                 {CU_STREAM_WAIT_VALUE_AND, 6, 9, 2},
                                 {CU_STREAM_WAIT_VALUE_NOR, 0xff, 0xffffff00, 0x7fffff00}}) {
    SCOPED_TRACE(::testing::Message() << each.flags << ": " << each.value << ", " << each.unmet << ", " << each.met);
    const CUstream queue = stream();
    const bool is_geq_around = each.value == 0xffffffff;  // 7 is later than 2^32 - 1: the count has wrapped
    store(number, each.unmet);
    ASSERT_EQ(wait(queue, number, each.value, each.flags), CUDA_SUCCESS);
    EXPECT_EQ(query(queue), CUDA_ERROR_NOT_READY);
    EXPECT_EQ(query(queue), is_geq_around ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
    store(number, each.met);
    EXPECT_EQ(synchronize(queue), CUDA_SUCCESS);
  }
}

TEST_F(SimValues, WhatCantBeWaitedForIsRefused) {
  const CUstream queue = stream();
  uint32_t* number = pinned();
  uint32_t pageable = 0;
  EXPECT_EQ(wait(queue, number, 1, 4), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(wait(queue, number, 1, CU_STREAM_WAIT_VALUE_FLUSH), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(wait(queue, &pageable, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(wait(queue, nullptr, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuStreamWaitValue32(queue, at(number) + 1, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuStreamWriteValue32(queue, at(number) + 2, 1, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuStreamWriteValue32(queue, at(number), 1, 2), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(write(queue, &pageable, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(live().queued_items, 0u);
}

TEST_F(SimValues, AnotherThreadWritesTheNumber) {
  const CUstream queue = stream();
  uint32_t* number = pinned();
  ASSERT_EQ(wait(queue, number, 3), CUDA_SUCCESS);
  std::thread writer([&] {
    std::this_thread::sleep_for(5ms);
    for (uint32_t value = 1; value <= 3; ++value) store(number, value);
  });
  EXPECT_EQ(synchronize(queue), CUDA_SUCCESS);
  EXPECT_EQ(std::atomic_ref(*number).load(), 3u);
  writer.join();
}

TEST_F(SimValues, WhoWaitsForAnotherStreamIsNotHeldUp) {
  const CUstream blocked = stream(), other = stream();
  uint32_t* number = pinned();
  ASSERT_EQ(wait(blocked, number, 1), CUDA_SUCCESS);
  std::thread waiter([&] { EXPECT_EQ(synchronize(blocked), CUDA_SUCCESS); });
  const CUdeviceptr address = mapped();
  for (int turn = 0; turn < 20; ++turn) {
    ASSERT_EQ(driver.f_cuMemsetD8Async(address, 1, kGranule, other), CUDA_SUCCESS);
    EXPECT_EQ(synchronize(other), CUDA_SUCCESS);
  }
  ASSERT_EQ(write(other, number, 1), CUDA_SUCCESS);
  EXPECT_EQ(synchronize(other), CUDA_SUCCESS);
  waiter.join();
}

TEST_F(SimValues, TheWriteMayBeQueuedInAnUnwatchedStream) {
  const CUstream waiting = stream(), writing = stream();
  uint32_t* number = pinned();
  ASSERT_EQ(wait(waiting, number, 1), CUDA_SUCCESS);
  ASSERT_EQ(write(writing, number, 1), CUDA_SUCCESS);
  EXPECT_EQ(*number, 0u);
  EXPECT_EQ(synchronize(waiting), CUDA_SUCCESS) << "a device works on all of its streams";
  EXPECT_EQ(*number, 1u);
  // The same when it is polled.
  ASSERT_EQ(wait(waiting, number, 2), CUDA_SUCCESS);
  ASSERT_EQ(write(writing, number, 2), CUDA_SUCCESS);
  EXPECT_EQ(query(waiting), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(query(waiting), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(query(waiting), CUDA_SUCCESS);
}

TEST_F(SimValues, NumbersInDeviceMemoryPassABaton) {
  const CUdeviceptr baton = mapped();
  const CUstream streams[2] = {stream(), stream()};
  for (uint32_t round = 0; round < 20; ++round) {
    const CUstream own = streams[round % 2];
    ASSERT_EQ(driver.f_cuStreamWaitValue32(own, baton, round, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
    ASSERT_EQ(driver.f_cuStreamWriteValue32(own, baton, round + 1, 0), CUDA_SUCCESS);
  }
  std::thread one([&] { EXPECT_EQ(synchronize(streams[0]), CUDA_SUCCESS); });
  std::thread two([&] { EXPECT_EQ(synchronize(streams[1]), CUDA_SUCCESS); });
  one.join();
  two.join();
  EXPECT_EQ(*reinterpret_cast<uint32_t*>(bytes_at(baton)), 20u);
}

TEST_F(SimValues, EagerWorkStopsAtAWaitAndNoThreadHangs) {
  control.set_async(EBBTIDE_SIM_EAGER, 0);
  const CUstream queue = stream();
  uint32_t* number = pinned();
  ASSERT_EQ(wait(queue, number, 1), CUDA_SUCCESS);
  ASSERT_EQ(write(queue, number + 1, 5), CUDA_SUCCESS);
  EXPECT_EQ(number[1], 0u) << "order within the stream is kept";
  control.run_queued();
  EXPECT_EQ(live().queued_items, 2u);
  store(number, 1);
  control.run_queued();
  EXPECT_EQ(live().queued_items, 0u);
  EXPECT_EQ(number[1], 5u);
}

TEST_F(SimValues, EventsAndTheLegacyStreamWaitToo) {
  const CUstream blocking = stream(CU_STREAM_DEFAULT), other = stream();
  uint32_t* number = pinned();
  const CUevent passed = event();
  ASSERT_EQ(wait(blocking, number, 1), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuEventRecord(passed, blocking), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuStreamWaitEvent(other, passed, 0), CUDA_SUCCESS);
  ASSERT_EQ(write(other, number + 1, 1), CUDA_SUCCESS);
  ASSERT_EQ(write(nullptr, number + 2, 1), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuEventQuery(passed), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(query(other), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(query(nullptr), CUDA_ERROR_NOT_READY);
  control.run_queued();
  EXPECT_EQ(number[1] + number[2], 0u);
  store(number, 1);
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(number[1] + number[2], 2u);
}

TEST_F(SimValues, ADestroyedStreamFinishesItsWork) {
  const CUstream queue = stream();
  uint32_t* number = pinned();
  ASSERT_EQ(wait(queue, number, 1), CUDA_SUCCESS);
  ASSERT_EQ(write(queue, number + 1, 1), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuStreamDestroy(queue), CUDA_SUCCESS) << "it does not wait";
  EXPECT_EQ(live().streams, 0u);
  EXPECT_EQ(live().queued_items, 2u);
  EXPECT_EQ(query(queue), CUDA_ERROR_INVALID_HANDLE);
  store(number, 1);
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(number[1], 1u);
  EXPECT_EQ(live().queued_items, 0u);
}

TEST_F(SimValues, MemoryThatGoesEndsTheWaitWithAFault) {
  const CUdeviceptr address = mapped();
  const CUstream queue = stream(), writer = stream();
  ASSERT_EQ(driver.f_cuStreamWaitValue32(queue, address, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuStreamWaitValue32(writer, address, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemUnmap(address, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(synchronize(queue), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS) << "a harmed context's waits are thrown away";
  EXPECT_EQ(live().queued_items, 1u);
}

TEST_F(SimValues, AWriteToMemoryThatHasGoneIsAFault) {
  const CUdeviceptr address = mapped();
  const CUstream queue = stream();
  ASSERT_EQ(driver.f_cuStreamWriteValue32(queue, address, 1, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemUnmap(address, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(synchronize(queue), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_F(SimValues, AResetLetsAWaiterGo) {
  const CUstream queue = stream();
  ASSERT_EQ(wait(queue, pinned(), 1), CUDA_SUCCESS);
  std::atomic<bool> is_over = false;
  std::thread waiter([&] {
    synchronize(queue);
    is_over = true;
  });
  std::this_thread::sleep_for(5ms);
  EXPECT_FALSE(is_over);
  control.reset();
  waiter.join();
}

}  // namespace
}  // namespace ebbtide::testing
