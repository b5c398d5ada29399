// The simulator's control interface: failures on demand, counting, the log, capacity, versions, and reset.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "sim_fixture.h"

namespace ebbtide::testing {
namespace {

using SimControlInterface = SimTest;

TEST_F(SimControlInterface, TheKthCallFailsAndHasNoEffect) {
  control.fail("cuMemCreate", 2, CUDA_ERROR_OUT_OF_MEMORY, 1);
  CUmemGenericAllocationHandle first = 0, second = 77, third = 0;
  EXPECT_EQ(create(first, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(create(second, kGranule), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(second, 77u);
  EXPECT_EQ(live().handles, 1u);
  EXPECT_EQ(create(third, kGranule), CUDA_SUCCESS);
}

TEST_F(SimControlInterface, AFailureLastsAsLongAsAsked) {
  const auto free_memory = [&] {
    size_t free = 0, total = 0;
    return driver.f_cuMemGetInfo(&free, &total);
  };
  control.fail("cuMemGetInfo", 2, 999, 2);
  for (const int code : {0, 999, 999, 0}) EXPECT_EQ(free_memory(), code);
  control.fail("cuMemGetInfo", 1, 304, 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(free_memory(), 304);
  control.clear_failures();
  EXPECT_EQ(free_memory(), CUDA_SUCCESS);
}

TEST_F(SimControlInterface, AStarCountsEveryCall) {
  int count = 0;
  for (const char* everything : {static_cast<const char*>(nullptr), "*"}) {
    control.fail(everything, 3, CUDA_ERROR_UNKNOWN, 1);
    EXPECT_EQ(driver.f_cuDeviceGetCount(&count), CUDA_SUCCESS);
    EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
    EXPECT_EQ(driver.f_cuDeviceGetCount(&count), CUDA_ERROR_UNKNOWN);
    EXPECT_EQ(driver.f_cuDeviceGetCount(&count), CUDA_SUCCESS);
    control.clear_failures();
  }
}

TEST_F(SimControlInterface, AFailureComesBeforeEveryCheck) {
  control.fail("cuMemRelease", 1, CUDA_ERROR_UNKNOWN, 1);
  EXPECT_EQ(driver.f_cuMemRelease(0xDEAD), CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(driver.f_cuMemRelease(0xDEAD), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SimControlInterface, TheLogTellsArgumentsAndResult) {
  control.clear_log();
  driver.f_cuMemMap(0x200000, 4194304, 0, 0xABC, 0);
  driver.f_cuCtxSynchronize();
  EXPECT_EQ(log(),
            "cuMemMap(ptr=0x200000, size=4194304, offset=0, handle=0xabc, flags=0x0) = 1\ncuCtxSynchronize() = 0\n");
  char few[12];
  EXPECT_EQ(control.log(few, sizeof few), log().size());
  EXPECT_STREQ(few, "cuMemMap(pt");
  EXPECT_EQ(control.calls("cuMemMap"), 1u);
  EXPECT_EQ(control.calls(nullptr), 2u);
  control.clear_log();
  EXPECT_EQ(control.calls("cuMemMap"), 0u);
  EXPECT_EQ(log(), "");
}

TEST_F(SimControlInterface, TheLogKeepsTheNewestLines) {
  control.clear_log();
  int count = 0;
  driver.f_cuCtxSynchronize();
  for (int i = 0; i < 65536; ++i) driver.f_cuDeviceGetCount(&count);
  const std::string text = log();
  EXPECT_EQ(text.find("cuCtxSynchronize"), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 65536);
  EXPECT_EQ(control.calls(nullptr), 65537u);
}

TEST_F(SimControlInterface, ADelaySlowsOneFunctionDown) {
  using Clock = std::chrono::steady_clock;
  control.set_delay("cuCtxSynchronize", 30000);
  auto start = Clock::now();
  driver.f_cuCtxSynchronize();
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(30));
  control.set_delay("cuCtxSynchronize", 0);
  start = Clock::now();
  driver.f_cuCtxSynchronize();
  EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(30));
}

TEST_F(SimControlInterface, CapacityBoundsDeviceMemoryOnly) {
  control.set_capacity(0, 4 * kGranule);
  size_t free = 0, total = 0;
  CUmemGenericAllocationHandle handle = 0, host = 0;
  EXPECT_EQ(create(handle, 5 * kGranule), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(create(handle, 3 * kGranule), CUDA_SUCCESS);
  EXPECT_EQ(create(host, 64 * kGranule, CU_MEM_LOCATION_TYPE_HOST_NUMA), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuMemGetInfo(&free, &total), CUDA_SUCCESS);
  EXPECT_EQ(free, kGranule);
  EXPECT_EQ(total, 4 * kGranule);
  EXPECT_EQ(live().device_bytes, 3 * kGranule);
  CUdeviceptr linear = 0;
  EXPECT_EQ(driver.f_cuMemAlloc(&linear, kGranule + 1), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(driver.f_cuMemAlloc(&linear, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(live().device_bytes, kGranule);
}

TEST_F(SimControlInterface, ForeignBytesCountAsUsed) {
  size_t free = 0, total = 0;
  control.set_capacity(0, 8 * kGranule);
  control.set_foreign_bytes(0, 6 * kGranule);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(create(handle, 4 * kGranule), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(driver.f_cuMemGetInfo(&free, &total), CUDA_SUCCESS);
  EXPECT_EQ(free, 2 * kGranule);
  control.set_foreign_bytes(0, 100 * kGranule);
  EXPECT_EQ(driver.f_cuMemGetInfo(&free, &total), CUDA_SUCCESS);
  EXPECT_EQ(free, 0u);
  control.set_foreign_bytes(0, 0);
  EXPECT_EQ(create(handle, 4 * kGranule), CUDA_SUCCESS);
}

TEST_F(SimControlInterface, MemoryLivesUntilItsLastMappingGoes) {
  const CUdeviceptr address = reserve(2 * kGranule);
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(create(handle, kGranule), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemMap(address, kGranule, 0, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemMap(address + kGranule, kGranule, 0, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(live().handles, 0u);
  ASSERT_EQ(driver.f_cuMemUnmap(address, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(live().device_bytes, kGranule);
  ASSERT_EQ(driver.f_cuMemUnmap(address + kGranule, kGranule), CUDA_SUCCESS);
  EXPECT_EQ(live().device_bytes, 0u);
}

TEST_F(SimControlInterface, BadHandlesAreErrorsWhereTheRealDriverCrashes) {
  const CUdeviceptr address = reserve(kGranule);
  EXPECT_EQ(driver.f_cuMemMap(address, kGranule, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuMemMap(address, kGranule, 0, 0xDEAD, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuMemRelease(0xDEAD), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuStreamSynchronize(reinterpret_cast<CUstream>(0xDEAD)), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(driver.f_cuEventQuery(reinterpret_cast<CUevent>(0xDEAD)), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(driver.f_cuCtxSetCurrent(reinterpret_cast<CUcontext>(0xDEAD)), CUDA_ERROR_INVALID_CONTEXT);
}

// The real driver's answer here depends on its other reservations nearby.
TEST_F(SimControlInterface, NothingReachesBeyondReservations) {
  const CUdeviceptr address = reserve(2 * kGranule);
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(create(handle, 2 * kGranule), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuMemMap(address + kGranule, 2 * kGranule, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuMemMap(address, 2 * kGranule, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuMemUnmap(address, 3 * kGranule), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuMemUnmap(address, 2 * kGranule), CUDA_SUCCESS);
}

TEST_F(SimControlInterface, TheResolverKnowsVersionsAndHiddenNames) {
  const auto look_up = sim_function<CUresult(const char*, void**, int, cuuint64_t, int*)>("cuGetProcAddress_v2");
  void* address = nullptr;
  int status = -1;
  const auto answer = [&](const char* name) {
    EXPECT_EQ(look_up(name, &address, 13000, 0, &status), CUDA_SUCCESS);
    return status;
  };
  EXPECT_EQ(answer("cuMemCreate"), 0);
  EXPECT_EQ(address, reinterpret_cast<void*>(driver.f_cuMemCreate));
  control.hide_function("cuMemCreate");
  EXPECT_EQ(answer("cuMemCreate"), 1);
  EXPECT_EQ(address, nullptr);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(create(handle, kGranule), CUDA_ERROR_NOT_SUPPORTED);
  control.hide_function(nullptr);
  EXPECT_EQ(answer("cuMemCreate"), 0);
  control.set_driver_version(10000);
  EXPECT_EQ(answer("cuMemCreate"), 1);
  EXPECT_EQ(answer("cuMemAlloc"), 0);
  int version = 0;
  EXPECT_EQ(driver.f_cuDriverGetVersion(&version), CUDA_SUCCESS);
  EXPECT_EQ(version, 10000);
}

TEST_F(SimControlInterface, CountsCoverWhatLives) {
  mapped();
  stream();
  event();
  void* pinned = nullptr;
  static char registered[8192];
  EXPECT_EQ(driver.f_cuMemHostAlloc(&pinned, 5000, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuMemHostRegister(registered, sizeof registered, 0), CUDA_SUCCESS);
  CUdeviceptr linear = 0;
  EXPECT_EQ(driver.f_cuMemAlloc(&linear, 100), CUDA_SUCCESS);
  const ebbtide_sim_counts counts = live();
  EXPECT_EQ(counts.reservations, 1u);
  EXPECT_EQ(counts.mappings, 1u);
  EXPECT_EQ(counts.handles, 0u);
  EXPECT_EQ(counts.streams, 1u);
  EXPECT_EQ(counts.events, 1u);
  EXPECT_EQ(counts.pinned_blocks, 1u);
  EXPECT_EQ(counts.pinned_bytes, 5000u);
  EXPECT_EQ(counts.registered_ranges, 1u);
  EXPECT_EQ(counts.contexts_retained, 1u);
  EXPECT_EQ(counts.device_bytes, kGranule + 4096);
}

TEST_F(SimControlInterface, ResetStartsOver) {
  const CUdeviceptr address = mapped();
  const CUstream old = stream();
  ASSERT_EQ(driver.f_cuMemsetD8Async(address, 1, 64, old), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuStreamBeginCapture(stream(), CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  control.set_driver_version(12000);
  control.fail("cuInit", 1, 999, 0);
  control.reset();
  const ebbtide_sim_counts counts = live(), nothing{};
  EXPECT_EQ(std::memcmp(&counts, &nothing, sizeof counts), 0);
  EXPECT_EQ(control.calls(nullptr), 0u);
  CUcontext context = nullptr;
  EXPECT_EQ(driver.f_cuCtxGetCurrent(&context), CUDA_ERROR_NOT_INITIALIZED);
  ASSERT_EQ(driver.f_cuInit(0), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuCtxGetCurrent(&context), CUDA_SUCCESS);
  EXPECT_EQ(context, nullptr);
  EXPECT_EQ(driver.f_cuStreamSynchronize(old), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(driver.f_cuMemUnmap(address, kGranule), CUDA_ERROR_INVALID_VALUE);
  int version = 0;
  EXPECT_EQ(driver.f_cuDriverGetVersion(&version), CUDA_SUCCESS);
  EXPECT_EQ(version, 13000);
}

TEST_F(SimControlInterface, DevicesAreCountedAndApart) {
  control.reset();
  control.set_device_count(3);
  control.set_capacity(2, 7 * kGranule);
  start();
  int count = 0;
  size_t bytes = 0;
  EXPECT_EQ(driver.f_cuDeviceGetCount(&count), CUDA_SUCCESS);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(driver.f_cuDeviceTotalMem(&bytes, 2), CUDA_SUCCESS);
  EXPECT_EQ(bytes, 7 * kGranule);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(create(handle, 8 * kGranule, CU_MEM_LOCATION_TYPE_DEVICE, 2), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(create(handle, 8 * kGranule, CU_MEM_LOCATION_TYPE_DEVICE, 1), CUDA_SUCCESS);
  EXPECT_EQ(create(handle, kGranule, CU_MEM_LOCATION_TYPE_DEVICE, 3), CUDA_ERROR_INVALID_DEVICE);
}

TEST_F(SimControlInterface, NoDevicesIsAnErrorOfInit) {
  control.reset();
  control.set_device_count(0);
  EXPECT_EQ(driver.f_cuInit(0), CUDA_ERROR_NO_DEVICE);
}

int status_of_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) body();
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 256;
}

// Invariant 10: a forked child may exit normally. Any other use is an error.
TEST_F(SimControlInterface, AForkedChildIsRefusedAndExits) {
  const CUdeviceptr address = mapped();
  *bytes_at(address) = 'p';
  const int status = status_of_child([&] {
    const bool is_refused = driver.f_cuMemUnmap(address, kGranule) == CUDA_ERROR_NOT_INITIALIZED &&
                            driver.f_cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
                            driver.f_cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED;
    control.reset();
    std::exit(is_refused ? 0 : 1);
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(*bytes_at(address), 'p');
  EXPECT_EQ(live().mappings, 1u);
}

TEST_F(SimControlInterface, CallsAtExitStillWork) {
  control.reset();
  static const SimDriver* at_exit;
  static CUdeviceptr address;
  at_exit = &driver;
  const int status = status_of_child([&] {
    start();
    address = mapped();
    std::atexit([] {
      const CUresult result = at_exit->f_cuMemUnmap(address, kGranule);
      if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED) _exit(3);
    });
    std::exit(0);
  });
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ebbtide::testing
