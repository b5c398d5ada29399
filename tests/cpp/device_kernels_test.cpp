// The kernels as the core loads them: once on success. A refusal for good is not repeated; a failure that may pass is
// tried again.
#include "driver/device_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "core/probe/capabilities.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "store/host_memory.h"

namespace ebbtide::testing {
namespace {

uint64_t loads() { return sim().calls("cuModuleLoadData"); }
uint64_t modules() {
  ebbtide_sim_counts counts;
  sim().live(&counts);
  return counts.modules;
}

Capability capability(const std::string& name) {
  for (const Capability& each : probe_capabilities(0)) {
    if (each.name == name) return each;
  }
  ADD_FAILURE() << name << " is no capability";
  return {};
}

class DeviceKernelsTest : public CoreTest {};

TEST_F(DeviceKernelsTest, AreLoadedOnceForEachDevice) {
  const DeviceKernels* first = DeviceKernels::of(0);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(DeviceKernels::of(0), first);
  EXPECT_EQ(loads(), 1u);
  EXPECT_NE(DeviceKernels::of(1), first);
  EXPECT_EQ(loads(), 2u);
  EXPECT_EQ(DeviceKernels::of(-1), nullptr);
  EXPECT_EQ(DeviceKernels::of(kDevices), nullptr);
  EXPECT_EQ(DeviceKernels::of(kMaxDevices), nullptr);
}

TEST_F(DeviceKernelsTest, ThreadsThatAskAtOnceGetTheSame) {
  sim().set_delay("cuModuleLoadData", 5000);
  std::vector<const DeviceKernels*> found(8);
  std::vector<std::thread> threads;
  for (auto& each : found) threads.emplace_back([&each] { each = DeviceKernels::of(0); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(found[0], nullptr);
  EXPECT_EQ(std::count(found.begin(), found.end(), found[0]), 8);
  EXPECT_EQ(loads(), 1u);
}

TEST_F(DeviceKernelsTest, DigestWhatTheyFill) {
  const ContextScope scope(1);
  const DeviceKernels& kernels = *DeviceKernels::of(1);
  const CUdeviceptr address = alloc("w", 2 * kernels::kBlockBytes, BackupKind::kRam, 1);
  const auto pinned = HostMemory::allocate(3 * 4096);
  auto* fills = reinterpret_cast<kernels::BlockFill*>(pinned->bytes());
  auto* addresses = reinterpret_cast<uint64_t*>(pinned->bytes() + 4096);
  auto* reports = reinterpret_cast<kernels::BlockReport*>(pinned->bytes() + 2 * 4096);
  for (uint64_t index = 0; index < 2; ++index) {
    addresses[index] = address + index * kernels::kBlockBytes;
    fills[index] = {addresses[index], {index, 5}};
  }
  const Stream stream = Stream::create();
  kernels.fill(stream.get(), fills, 2);
  kernels.digest(stream.get(), addresses, reports, {1, 2}, 2);
  stream.synchronize();
  for (size_t index = 0; index < 2; ++index) {
    EXPECT_EQ(reports[index], kernels::digest_block(reinterpret_cast<const std::byte*>(addresses[index]), {1, 2}));
    EXPECT_EQ(reports[index].value, (kernels::Value{index, 5}));
    EXPECT_EQ(reports[index].is_constant, 1u);
  }
  auto* sections = reports + 2;
  kernels.digest(stream.get(), addresses, sections, {1, 2}, 2, kernels::kSections);
  stream.synchronize();
  for (size_t index = 0; index < 2; ++index)
    EXPECT_EQ(kernels::join_sections(sections + index * kernels::kSections, {1, 2}), reports[index]);
}

TEST_F(DeviceKernelsTest, ALaunchThatFailsThrows) {
  const DeviceKernels& kernels = *DeviceKernels::of(0);
  sim().fail("cuLaunchKernel", 1, CUDA_ERROR_OUT_OF_MEMORY, 2);
  EXPECT_THROW(kernels.fill(nullptr, nullptr, 1), DriverError);
  try {
    kernels.digest(nullptr, nullptr, nullptr, {}, 3);
    ADD_FAILURE() << "it must throw";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call, "cuLaunchKernel");
    EXPECT_EQ(error.arguments, "function=ebbtide_digest_blocks, grid=3");
  }
}

TEST_F(DeviceKernelsTest, NoMemoryIsNotForEver) {
  for (const char* call : {"cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreate", "cuLaunchKernel"}) {
    DeviceKernels::forget_all();
    const uint64_t before = modules();
    sim().fail(call, 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
    EXPECT_EQ(DeviceKernels::of(0), nullptr) << call;
    EXPECT_EQ(modules(), before) << "nothing is left behind";
    EXPECT_NE(DeviceKernels::of(0), nullptr) << call;
  }
}

TEST_F(DeviceKernelsTest, AModuleThatCantBeUnloadedIsLost) {
  sim().fail("cuModuleGetFunction", 2, CUDA_ERROR_OUT_OF_MEMORY, 1);
  sim().fail("cuModuleUnload", 1, CUDA_ERROR_UNKNOWN, 1);
  ::setenv("EBBTIDE_LOG", "info", 1);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(DeviceKernels::of(0), nullptr);
  const std::string said = ::testing::internal::GetCapturedStderr();
  ::setenv("EBBTIDE_LOG", "error", 1);
  EXPECT_NE(said.find("cuModuleUnload failed with CUDA_ERROR_UNKNOWN"), std::string::npos) << said;
  EXPECT_EQ(modules(), 1u);
  EXPECT_NE(DeviceKernels::of(0), nullptr);
}

TEST_F(DeviceKernelsTest, WhatTheDriverWillNeverTakeIsNotTriedAgain) {
  for (const int code : {CUDA_ERROR_INVALID_PTX, CUDA_ERROR_UNSUPPORTED_PTX_VERSION, CUDA_ERROR_INVALID_IMAGE,
                         CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED}) {
    DeviceKernels::forget_all();
    sim().fail("cuModuleLoadData", 1, code, 1);
    const uint64_t before = loads();
    EXPECT_EQ(DeviceKernels::of(0), nullptr);
    EXPECT_EQ(DeviceKernels::of(0), nullptr);
    EXPECT_EQ(loads(), before + 1) << code;
    EXPECT_NE(DeviceKernels::of(1), nullptr) << "another device may take it";
  }
}

TEST_F(DeviceKernelsTest, AFailureIsReportedOnce) {
  ::setenv("EBBTIDE_LOG", "warning", 1);
  sim().fail("cuModuleLoadData", 1, CUDA_ERROR_OUT_OF_MEMORY, 3);
  ::testing::internal::CaptureStderr();
  for (int turn = 0; turn < 3; ++turn) EXPECT_EQ(DeviceKernels::of(0), nullptr);
  const std::string said = ::testing::internal::GetCapturedStderr();
  ::setenv("EBBTIDE_LOG", "error", 1);
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_NE(said.find(name_in_use("cuModuleLoadData")), std::string::npos) << said;
  EXPECT_NE(said.find(is_hip() ? "the kernels' code objects" : "the kernels' PTX"), std::string::npos) << said;
}

TEST_F(DeviceKernelsTest, TheProbesTryThemOut) {
  EXPECT_TRUE(capability("kernels").is_available) << capability("kernels").found;
  EXPECT_TRUE(capability("stream_wait_value").is_available) << capability("stream_wait_value").found;
  EXPECT_EQ(capability("kernels").advice, "");
  EXPECT_EQ(capability("driver").found, is_hip() ? "HIP 7.1" : "CUDA 13.0");
  expect_no_leak();
}

TEST_F(DeviceKernelsTest, TheProbesSayWhatFails) {
  for (const auto& [call, name] : {std::pair{"cuLaunchKernel", "kernels"},
                                   {"cuModuleLoadData", "kernels"},
                                   {"cuStreamWaitValue32", "stream_wait_value"},
                                   {"cuStreamWriteValue32", "stream_wait_value"}}) {
    DeviceKernels::forget_all();
    sim().fail(call, 1, CUDA_ERROR_NOT_SUPPORTED, 0);
    const Capability found = capability(name);
    sim().clear_failures();
    EXPECT_FALSE(found.is_available) << call;
    EXPECT_NE(found.found, "") << call;
    EXPECT_NE(found.advice, "") << call;
  }
  expect_no_leak();
}

}  // namespace
}  // namespace ebbtide::testing
