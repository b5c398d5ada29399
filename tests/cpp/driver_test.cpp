// The first use of the driver in a process. Each of these tests runs in its own process.
#include "driver/driver.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "driver/context.h"
#include "driver/hip.h"
#include "sim_control.h"

namespace ebbtide::testing {
namespace {

TEST(DriverTest, ThreadsThatComeFirstAtOnceShareOneTable) {
  sim().reset();
  use_driver("sim");
  sim().set_delay("cuInit", 100'000);
  std::vector<const Driver*> tables(4);
  {
    std::vector<std::jthread> threads;
    for (const Driver*& table : tables) threads.emplace_back([&table] { table = &driver(); });
  }
  EXPECT_EQ(std::set<const Driver*>(tables.begin(), tables.end()).size(), 1u);
  EXPECT_EQ(sim().calls("cuInit"), 1u);
  EXPECT_EQ(driver_if_loaded(), tables.front());
}

TEST(DriverTest, AContextIsRetainedOnceByThreadsThatComeFirstAtOnce) {
  sim().reset();
  use_driver("sim");
  check(driver().cuInit(0), "cuInit");
  sim().set_delay("cuDevicePrimaryCtxRetain", 100'000);
  std::vector<CUcontext> contexts(4);
  {
    std::vector<std::jthread> threads;
    for (CUcontext& context : contexts) threads.emplace_back([&context] { context = primary_context(0); });
  }
  EXPECT_EQ(std::set<CUcontext>(contexts.begin(), contexts.end()).size(), 1u);
  EXPECT_EQ(sim().calls("cuDevicePrimaryCtxRetain"), 1u);
}

TEST(DriverTest, AnUnknownNameIsSaidAndCut) {
  const std::string name(300, 'x');
  try {
    use_driver(name.c_str());
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()).find(std::string(41, 'x')), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(std::string(40, 'x')), std::string::npos);
  }
  EXPECT_STREQ(driver_name(), "");
  EXPECT_EQ(driver_if_loaded(), nullptr);
}

TEST(DriverTest, WithoutANameTheVariableChooses) {
  ::setenv("EBBTIDE_DRIVER", "sim", 1);
  use_driver(nullptr);
  EXPECT_STREQ(driver_name(), "sim");
  ::unsetenv("EBBTIDE_DRIVER");
  use_driver(nullptr);
  EXPECT_STREQ(driver_name(), "cuda") << "the default";
}

// A failure is not remembered, because a driver may become available later.
TEST(DriverTest, ADriverThatDoesNotStartIsAskedAgain) {
  sim().reset();
  use_driver("sim");
  sim().fail("cuInit", 1, CUDA_ERROR_NO_DEVICE, 1);
  EXPECT_THROW(driver(), DriverError);
  EXPECT_EQ(driver_if_loaded(), nullptr);
  EXPECT_NO_THROW(use_driver("sim"));
  EXPECT_NE(driver().cuInit, nullptr);
  EXPECT_THROW(use_driver("cuda"), StateError);
  EXPECT_STREQ(driver_name(), "sim");
}

TEST(DriverTest, ADriverThatLacksAFunctionIsNamed) {
  if (is_hip()) GTEST_SKIP() << "the linker finds HIP's functions, and the simulator hides none from it";
  sim().reset();
  use_driver("sim");
  sim().hide_function("cuMemMap");
  try {
    driver();
    FAIL() << "nothing was thrown";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("lacks cuMemMap:"), std::string::npos) << error.what();
  }
  sim().hide_function(nullptr);
  EXPECT_NO_THROW(driver());
}

TEST(DriverTest, WhatALibraryOfHipLacksIsNamed) {
  try {
    resolve_hip(::dlopen(nullptr, RTLD_NOW));
    FAIL() << "nothing was thrown";
  } catch (const StateError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("HIP lacks hipInit, hipDriverGetVersion, ")) << error.what();
  }
}

// Its structures are others.
TEST(DriverTest, HipBefore6IsRefused) {
  ::setenv("EBBTIDE_SIM_HIP", "1", 1);
  sim().reset();
  sim().set_driver_version(50700000);
  use_driver("sim");
  try {
    driver();
    FAIL() << "nothing was thrown";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("older than 6.0"), std::string::npos) << error.what();
  }
  sim().set_driver_version(60000000);
  EXPECT_NO_THROW(driver());
}

}  // namespace
}  // namespace ebbtide::testing
