// Peers on the simulator: which devices reach each other, what enabling does, and the access that copies, fills and
// kernels need.
#include "kernels/blocks.h"
#include "sim_fixture.h"

namespace ebbtide::testing {
namespace {

class SimPeers : public SimTest {
 protected:
  void SetUp() override {
    control.reset();
    control.set_device_count(2);
    start();
    ASSERT_EQ(driver.f_cuCtxGetCurrent(&first_), CUDA_SUCCESS);
    ASSERT_EQ(driver.f_cuDevicePrimaryCtxRetain(&second_, 1), CUDA_SUCCESS);
  }

  CUresult grant(CUdeviceptr address, int device) {
    const CUmemAccessDesc description{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return driver.f_cuMemSetAccess(address, kGranule, &description, 1);
  }
  CUdeviceptr linear() {
    CUdeviceptr address = 0;
    EXPECT_EQ(driver.f_cuMemAlloc(&address, kGranule), CUDA_SUCCESS);
    return address;
  }
  void use(CUcontext context) { ASSERT_EQ(driver.f_cuCtxSetCurrent(context), CUDA_SUCCESS); }
  CUresult fill(CUdeviceptr address) {
    const CUresult result = driver.f_cuMemsetD8Async(address, 7, kGranule, nullptr);
    return result == CUDA_SUCCESS ? driver.f_cuCtxSynchronize() : result;
  }
  CUresult copy(CUdeviceptr to, CUdeviceptr from) {
    const CUresult result = driver.f_cuMemcpyDtoDAsync(to, from, kGranule, nullptr);
    return result == CUDA_SUCCESS ? driver.f_cuCtxSynchronize() : result;
  }

  CUcontext first_ = nullptr;
  CUcontext second_ = nullptr;
};

TEST_F(SimPeers, EveryDeviceReachesEveryOtherUntilToldOtherwise) {
  int can = -1;
  ASSERT_EQ(driver.f_cuDeviceCanAccessPeer(&can, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(can, 1);
  ASSERT_EQ(driver.f_cuDeviceCanAccessPeer(&can, 1, 1), CUDA_SUCCESS);
  EXPECT_EQ(can, 0) << "a device is no peer of its own";
  control.set_peers(1, 0, 0);
  ASSERT_EQ(driver.f_cuDeviceCanAccessPeer(&can, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(can, 0);
  ASSERT_EQ(driver.f_cuDeviceCanAccessPeer(&can, 0, 1), CUDA_SUCCESS);
  EXPECT_EQ(can, 1) << "each direction by itself";
  control.set_peers(1, 0, 1);
  ASSERT_EQ(driver.f_cuDeviceCanAccessPeer(&can, 1, 0), CUDA_SUCCESS);
  EXPECT_EQ(can, 1);
  EXPECT_EQ(driver.f_cuDeviceCanAccessPeer(&can, 2, 0), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(driver.f_cuDeviceCanAccessPeer(&can, 0, -1), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_EQ(driver.f_cuDeviceCanAccessPeer(nullptr, 0, 1), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SimPeers, AccessIsEnabledOnceFromOneContextToAnother) {
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(second_, 1), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(first_, 0), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(nullptr, 0), CUDA_ERROR_INVALID_CONTEXT);
  control.set_peers(0, 1, 0);
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(second_, 0), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
  control.set_peers(0, 1, 1);
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(second_, 0), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(second_, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  ASSERT_EQ(driver.f_cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(second_, 0), CUDA_ERROR_INVALID_CONTEXT);
  ASSERT_EQ(driver.f_cuDevicePrimaryCtxRetain(&second_, 1), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuCtxEnablePeerAccess(second_, 0), CUDA_SUCCESS) << "it ended with the context";
}

TEST_F(SimPeers, VirtualMemoryIsUsedByThoseWhoseAccessWasSet) {
  const CUdeviceptr memory = mapped();
  use(second_);
  const CUdeviceptr own = linear();
  EXPECT_EQ(fill(memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(copy(memory, own), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(copy(own, memory), CUDA_ERROR_INVALID_VALUE);
  // Enabled access applies to the driver's own memory.
  ASSERT_EQ(driver.f_cuCtxEnablePeerAccess(first_, 0), CUDA_SUCCESS);
  EXPECT_EQ(copy(memory, own), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(grant(memory, 1), CUDA_SUCCESS);
  EXPECT_EQ(fill(memory), CUDA_SUCCESS);
  EXPECT_EQ(copy(memory, own), CUDA_SUCCESS);
  EXPECT_EQ(copy(own, memory), CUDA_SUCCESS);
}

TEST_F(SimPeers, AccessCantBeSetForADeviceThatDoesNotReachTheMemory) {
  control.set_peers(1, 0, 0);
  const CUdeviceptr memory = mapped();
  EXPECT_EQ(grant(memory, 1), CUDA_ERROR_INVALID_DEVICE);
  use(second_);
  EXPECT_EQ(fill(memory), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SimPeers, NativeMemoryIsCopiedByAllAndUsedByKernelsOfThoseThatEnabledIt) {
  const CUdeviceptr memory = linear();
  use(second_);
  const CUdeviceptr own = linear();
  EXPECT_EQ(copy(memory, own), CUDA_SUCCESS);
  EXPECT_EQ(copy(own, memory), CUDA_SUCCESS);
  EXPECT_EQ(fill(memory), CUDA_ERROR_INVALID_VALUE);
  CUmodule module = nullptr;
  CUfunction entry = nullptr;
  ASSERT_EQ(driver.f_cuModuleLoadData(&module, kernels::ptx()), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuModuleGetFunction(&entry, module, kernels::kFillEntry), CUDA_SUCCESS);
  kernels::BlockFill one{memory, {1, 2}};
  CUdeviceptr list = linear();
  ASSERT_EQ(driver.f_cuMemcpyHtoD(list, &one, sizeof one), CUDA_SUCCESS);
  uint32_t count = 1;
  void* parameters[] = {&list, &count};
  const auto launch = [&] {
    const CUresult result =
        driver.f_cuLaunchKernel(entry, 1, 1, 1, kernels::kThreads, 1, 1, 0, nullptr, parameters, nullptr);
    return result == CUDA_SUCCESS ? driver.f_cuCtxSynchronize() : result;
  };
  ASSERT_EQ(driver.f_cuCtxEnablePeerAccess(first_, 0), CUDA_SUCCESS);
  EXPECT_EQ(fill(memory), CUDA_SUCCESS);
  EXPECT_EQ(launch(), CUDA_SUCCESS);
  use(first_);
  const CUdeviceptr hers = linear();
  use(second_);
  EXPECT_EQ(fill(hers), CUDA_SUCCESS) << "later allocations as well";
}

TEST_F(SimPeers, AKernelThatTouchesAPeersMemoryWithoutAccessIsAFault) {
  const CUdeviceptr memory = linear();
  use(second_);
  CUmodule module = nullptr;
  CUfunction entry = nullptr;
  ASSERT_EQ(driver.f_cuModuleLoadData(&module, kernels::ptx()), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuModuleGetFunction(&entry, module, kernels::kFillEntry), CUDA_SUCCESS);
  kernels::BlockFill one{memory, {1, 2}};
  CUdeviceptr list = linear();
  ASSERT_EQ(driver.f_cuMemcpyHtoD(list, &one, sizeof one), CUDA_SUCCESS);
  uint32_t count = 1;
  void* parameters[] = {&list, &count};
  ASSERT_EQ(driver.f_cuLaunchKernel(entry, 1, 1, 1, kernels::kThreads, 1, 1, 0, nullptr, parameters, nullptr),
            CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
}

}  // namespace
}  // namespace ebbtide::testing
