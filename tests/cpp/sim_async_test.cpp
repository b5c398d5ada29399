// When and in what order the simulator runs asynchronous work, and its errors for memory that has been unmapped by
// then.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "sim_fixture.h"

namespace ebbtide::testing {
namespace {

class SimAsync : public SimTest {
 protected:
  // Queues work that appends `number` to `ran`.
  void note(CUstream stream, int number) {
    notes_.push_back(std::make_unique<Note>(Note{&ran, number}));
    ASSERT_EQ(driver.f_cuLaunchHostFunc(stream, &write_down, notes_.back().get()), CUDA_SUCCESS);
  }

  // Keeps host memory in place until the fixture ends.
  std::vector<int> ran;

 private:
  struct Note {
    std::vector<int>* ran;
    int number;
  };
  static void write_down(void* data) {
    const auto* note = static_cast<Note*>(data);
    note->ran->push_back(note->number);
  }
  std::vector<std::unique_ptr<Note>> notes_;
};

TEST_F(SimAsync, ACopyIsLateAndUsesTheHostMemoryOfThen) {
  const CUdeviceptr address = mapped();
  const CUstream copier = stream();
  std::vector<char> host(100, 'a');
  ASSERT_EQ(driver.f_cuMemcpyHtoDAsync(address, host.data(), host.size(), copier), CUDA_SUCCESS);
  EXPECT_EQ(*bytes_at(address), '\0');
  EXPECT_EQ(live().queued_items, 1u);
  std::fill(host.begin(), host.end(), 'b');
  ASSERT_EQ(driver.f_cuStreamSynchronize(copier), CUDA_SUCCESS);
  EXPECT_EQ(std::string(bytes_at(address), 100), std::string(100, 'b'));
  EXPECT_EQ(live().queued_items, 0u);
}

TEST_F(SimAsync, APollRunsOneItem) {
  const CUstream queue = stream();
  note(queue, 1);
  note(queue, 2);
  EXPECT_EQ(driver.f_cuStreamQuery(queue), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(ran, std::vector{1});
  EXPECT_EQ(driver.f_cuStreamQuery(queue), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(driver.f_cuStreamQuery(queue), CUDA_SUCCESS);
  EXPECT_EQ(ran, (std::vector{1, 2}));
}

TEST_F(SimAsync, AnEventIsReadyWhenItsRecordHasRun) {
  const CUstream queue = stream();
  const CUevent done = event();
  note(queue, 1);
  ASSERT_EQ(driver.f_cuEventRecord(done, queue), CUDA_SUCCESS);
  note(queue, 2);
  EXPECT_EQ(driver.f_cuEventQuery(done), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(driver.f_cuEventQuery(done), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(driver.f_cuEventQuery(done), CUDA_SUCCESS);
  EXPECT_EQ(ran, std::vector{1});
}

TEST_F(SimAsync, SynchronisingRunsNoMoreThanItMust) {
  const CUstream first = stream(), second = stream();
  const CUevent half = event();
  note(first, 1);
  ASSERT_EQ(driver.f_cuEventRecord(half, first), CUDA_SUCCESS);
  note(first, 2);
  ASSERT_EQ(driver.f_cuStreamWaitEvent(second, half, 0), CUDA_SUCCESS);
  note(second, 3);
  ASSERT_EQ(driver.f_cuStreamSynchronize(second), CUDA_SUCCESS);
  EXPECT_EQ(ran, (std::vector{1, 3}));
  ASSERT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(ran, (std::vector{1, 3, 2}));
}

TEST_F(SimAsync, APollOfAWaitingStreamRunsWhatItWaitsFor) {
  const CUstream first = stream(), second = stream();
  const CUevent done = event();
  note(first, 1);
  ASSERT_EQ(driver.f_cuEventRecord(done, first), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuStreamWaitEvent(second, done, 0), CUDA_SUCCESS);
  int polls = 0;
  while (driver.f_cuStreamQuery(second) == CUDA_ERROR_NOT_READY) ASSERT_LT(++polls, 10);
  EXPECT_EQ(ran, std::vector{1});
  EXPECT_EQ(polls, 3);
}

TEST_F(SimAsync, TheLegacyStreamOrdersBlockingStreamsOnly) {
  const CUstream blocking = stream(CU_STREAM_DEFAULT), free = stream(CU_STREAM_NON_BLOCKING);
  note(free, 1);
  note(blocking, 2);
  note(nullptr, 3);
  note(blocking, 4);
  ASSERT_EQ(driver.f_cuStreamSynchronize(blocking), CUDA_SUCCESS);
  EXPECT_EQ(ran, (std::vector{2, 3, 4}));
  ASSERT_EQ(driver.f_cuStreamSynchronize(free), CUDA_SUCCESS);
  EXPECT_EQ(ran.back(), 1);
}

TEST_F(SimAsync, ASynchronousCopyRunsWhatItComesAfter) {
  const CUdeviceptr address = mapped();
  const CUstream blocking = stream(CU_STREAM_DEFAULT), free = stream();
  ASSERT_EQ(driver.f_cuMemsetD8Async(address, 7, 8, blocking), CUDA_SUCCESS);
  note(free, 1);
  std::array<char, 8> host{};
  ASSERT_EQ(driver.f_cuMemcpyDtoH(host.data(), address, host.size()), CUDA_SUCCESS);
  EXPECT_EQ(host[7], 7);
  EXPECT_TRUE(ran.empty());
}

TEST_F(SimAsync, DestroyingAStreamRunsItsWork) {
  const CUstream queue = stream();
  note(queue, 1);
  ASSERT_EQ(driver.f_cuStreamDestroy(queue), CUDA_SUCCESS);
  EXPECT_EQ(ran, std::vector{1});
  EXPECT_EQ(driver.f_cuStreamSynchronize(queue), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(SimAsync, RunQueuedCatchesUp) {
  note(stream(), 1);
  note(nullptr, 2);
  control.run_queued();
  EXPECT_EQ(ran.size(), 2u);
  EXPECT_EQ(live().queued_items, 0u);
}

TEST_F(SimAsync, EagerRunsAtOnce) {
  control.set_async(EBBTIDE_SIM_EAGER, 0);
  const CUstream queue = stream();
  note(queue, 1);
  EXPECT_EQ(ran, std::vector{1});
  EXPECT_EQ(driver.f_cuStreamQuery(queue), CUDA_SUCCESS);
}

TEST_F(SimAsync, RandomIsTheSameForTheSameSeed) {
  const auto lengths = [&](uint64_t seed) {
    control.set_async(EBBTIDE_SIM_RANDOM, seed);
    const CUstream queue = stream();
    std::vector<size_t> seen;
    ran.clear();
    for (int i = 0; i < 32; ++i) {
      note(queue, i);
      seen.push_back(ran.size());
    }
    EXPECT_EQ(driver.f_cuStreamSynchronize(queue), CUDA_SUCCESS);
    EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end()));
    return seen;
  };
  const auto first = lengths(1), again = lengths(1), other = lengths(2);
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
}

TEST_F(SimAsync, MemoryThatHasGoneIsAFaultThatStays) {
  const CUdeviceptr address = mapped(), other = mapped();
  const CUstream queue = stream();
  ASSERT_EQ(driver.f_cuMemsetD8Async(address, 1, 16, queue), CUDA_SUCCESS);
  note(queue, 1);
  ASSERT_EQ(driver.f_cuMemUnmap(address, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuStreamSynchronize(queue), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_TRUE(ran.empty()) << "queued work of a faulted stream must not run";
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(driver.f_cuMemsetD8Async(other, 1, 16, nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(driver.f_cuMemUnmap(other, kGranule), CUDA_SUCCESS);
}

TEST_F(SimAsync, AccessThatHasGoneIsAFault) {
  const CUdeviceptr address = mapped();
  std::array<char, 16> host{};
  ASSERT_EQ(driver.f_cuMemcpyDtoHAsync(host.data(), address, host.size(), nullptr), CUDA_SUCCESS);
  ASSERT_EQ(set_access(address, kGranule, CU_MEM_ACCESS_FLAGS_PROT_NONE), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_F(SimAsync, ReadOnlyMemoryIsReadAndNotWritten) {
  const CUdeviceptr address = mapped();
  std::array<char, 16> host{};
  ASSERT_EQ(set_access(address, kGranule, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuMemcpyDtoH(host.data(), address, host.size()), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuMemcpyHtoD(address, host.data(), host.size()), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SimAsync, ALateCopyMeetsThePresentMapping) {
  const CUdeviceptr address = mapped();
  const CUstream queue = stream();
  ASSERT_EQ(driver.f_cuMemsetD8Async(address, 9, 16, queue), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemUnmap(address, kGranule), CUDA_SUCCESS);
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(create(handle, kGranule), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemMap(address, kGranule, 0, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(set_access(address, kGranule), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuStreamSynchronize(queue), CUDA_SUCCESS);
  EXPECT_EQ(*bytes_at(address), 9);
}

TEST_F(SimAsync, ABadHostPointerIsAnErrorAndNoCrash) {
  const CUdeviceptr address = mapped(), nothing = reserve(kGranule);
  EXPECT_EQ(driver.f_cuMemcpyHtoD(address, bytes_at(nothing), 64), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuMemcpyHtoD(address, reinterpret_cast<void*>(0x1000), 64), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(driver.f_cuMemcpyDtoHAsync(reinterpret_cast<void*>(0x1000), address, 64, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_F(SimAsync, CopiesCrossMappingsAndDevices) {
  control.reset();
  control.set_device_count(2);
  start();
  constexpr uint64_t size = 2 * kGranule;
  const CUdeviceptr address = reserve(size);
  for (int device = 0; device < 2; ++device) {
    CUmemGenericAllocationHandle handle = 0;
    ASSERT_EQ(create(handle, kGranule, CU_MEM_LOCATION_TYPE_DEVICE, device), CUDA_SUCCESS);
    ASSERT_EQ(driver.f_cuMemMap(address + device * kGranule, kGranule, 0, handle, 0), CUDA_SUCCESS);
  }
  ASSERT_EQ(set_access(address, size), CUDA_SUCCESS);
  std::vector<char> host(size), back(size);
  for (size_t i = 0; i < size; ++i) host[i] = static_cast<char>(i * 31 >> 3);
  ASSERT_EQ(driver.f_cuMemcpyHtoD(address, host.data(), size), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemcpyDtoDAsync(address + kGranule - 5000, address + 100, 10000, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemcpyDtoH(back.data(), address, size), CUDA_SUCCESS);
  std::copy_n(host.begin() + 100, 10000, host.begin() + kGranule - 5000);
  EXPECT_EQ(back, host);
}

}  // namespace
}  // namespace ebbtide::testing
