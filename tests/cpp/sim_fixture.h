#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "sim/control.h"

// The simulator by itself: its driver functions and its control functions, found by name and called directly.
namespace ebbtide::testing {

inline void* sim_library() {
  static void* const library = [] {
    void* opened = ::dlopen(EBBTIDE_SIM_PATH, RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) {
      std::fprintf(stderr, "%s\n", ::dlerror());
      std::abort();
    }
    return opened;
  }();
  return library;
}

template <typename Function>
Function* sim_function(const char* name) {
  void* address = ::dlsym(sim_library(), name);
  EXPECT_NE(address, nullptr) << name;
  return reinterpret_cast<Function*>(address);
}

#define EBBTIDE_SYMBOL_OF(name) #name
#define EBBTIDE_SYMBOL(name) EBBTIDE_SYMBOL_OF(name)
// cuda.h's macro turns the name into that of the exported symbol. The prefix keeps the plain name for the member.
struct SimDriver {
#define EBBTIDE_FUNCTION(name, ...) decltype(::name)* f_##name = sim_function<decltype(::name)>(EBBTIDE_SYMBOL(name));
#include "driver/functions.def"
#undef EBBTIDE_FUNCTION
};

struct SimControlTable {
#define EBBTIDE_CONTROL(name) \
  decltype(::ebbtide_sim_##name)* name = sim_function<decltype(::ebbtide_sim_##name)>("ebbtide_sim_" #name)
  EBBTIDE_CONTROL(reset);
  EBBTIDE_CONTROL(set_device_count);
  EBBTIDE_CONTROL(set_capacity);
  EBBTIDE_CONTROL(set_peers);
  EBBTIDE_CONTROL(set_driver_version);
  EBBTIDE_CONTROL(hide_function);
  EBBTIDE_CONTROL(fail);
  EBBTIDE_CONTROL(clear_failures);
  EBBTIDE_CONTROL(set_async);
  EBBTIDE_CONTROL(set_delay);
  EBBTIDE_CONTROL(live);
  EBBTIDE_CONTROL(calls);
  EBBTIDE_CONTROL(log);
  EBBTIDE_CONTROL(clear_log);
  EBBTIDE_CONTROL(run_queued);
  EBBTIDE_CONTROL(set_foreign_bytes);
#undef EBBTIDE_CONTROL
};

constexpr uint64_t kGranule = 2 << 20;

// A simulator that was just reset, with the primary context of device 0 current. Its name differs from that of the
// core's fixture because both are in one program.
class SimTest : public ::testing::Test {
 protected:
  void SetUp() override {
    control.reset();
    start();
  }
  void TearDown() override { control.reset(); }

  void start() {
    ASSERT_EQ(driver.f_cuInit(0), CUDA_SUCCESS);
    CUcontext context = nullptr;
    ASSERT_EQ(driver.f_cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    ASSERT_EQ(driver.f_cuCtxSetCurrent(context), CUDA_SUCCESS);
  }

  static CUmemAllocationProp properties(CUmemLocationType type = CU_MEM_LOCATION_TYPE_DEVICE, int id = 0) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {type, id};
    return prop;
  }

  CUresult create(CUmemGenericAllocationHandle& handle, uint64_t size,
                  CUmemLocationType type = CU_MEM_LOCATION_TYPE_DEVICE, int id = 0) {
    const CUmemAllocationProp prop = properties(type, id);
    return driver.f_cuMemCreate(&handle, size, &prop, 0);
  }

  CUresult set_access(CUdeviceptr address, uint64_t size,
                      CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    const CUmemAccessDesc description{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, flags};
    return driver.f_cuMemSetAccess(address, size, &description, 1);
  }

  CUdeviceptr reserve(uint64_t size) {
    CUdeviceptr address = 0;
    EXPECT_EQ(driver.f_cuMemAddressReserve(&address, size, 0, 0, 0), CUDA_SUCCESS);
    return address;
  }

  // An accessible mapping in its own reservation. The handle is released, so that unmapping frees the memory.
  CUdeviceptr mapped(uint64_t size = kGranule) {
    const CUdeviceptr address = reserve(size);
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(create(handle, size), CUDA_SUCCESS);
    EXPECT_EQ(driver.f_cuMemMap(address, size, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(set_access(address, size), CUDA_SUCCESS);
    EXPECT_EQ(driver.f_cuMemRelease(handle), CUDA_SUCCESS);
    return address;
  }

  CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream made = nullptr;
    EXPECT_EQ(driver.f_cuStreamCreate(&made, flags), CUDA_SUCCESS);
    return made;
  }

  CUevent event() {
    CUevent made = nullptr;
    EXPECT_EQ(driver.f_cuEventCreate(&made, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    return made;
  }

  // The content of device memory as the processor sees it: simulated device memory is memory of this process.
  static char* bytes_at(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

  ebbtide_sim_counts live() const {
    ebbtide_sim_counts counts;
    control.live(&counts);
    return counts;
  }

  std::string log() const {
    std::string text(control.log(nullptr, 0) + 1, '\0');
    control.log(text.data(), text.size());
    text.pop_back();
    return text;
  }

  const SimDriver driver;
  const SimControlTable control;
};

}  // namespace ebbtide::testing
