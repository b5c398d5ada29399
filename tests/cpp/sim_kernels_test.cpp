// Modules, kernels, and numbers that streams wait for: behaviour of the simulator that no test of both drivers can
// check.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/blocks.h"
#include "sim_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr kernels::Digest kSeed{7, 9};

class SimKernels : public SimTest {
 protected:
  CUmodule load(const char* image = kernels::ptx()) {
    CUmodule module = nullptr;
    EXPECT_EQ(driver.f_cuModuleLoadData(&module, image), CUDA_SUCCESS);
    return module;
  }
  CUfunction function(CUmodule module, const char* name) {
    CUfunction found = nullptr;
    EXPECT_EQ(driver.f_cuModuleGetFunction(&found, module, name), CUDA_SUCCESS);
    return found;
  }
  template <typename T>
  T* pinned(size_t count = 1) {
    void* bytes = nullptr;
    EXPECT_EQ(driver.f_cuMemHostAlloc(&bytes, count * sizeof(T), 0), CUDA_SUCCESS);
    std::memset(bytes, 0, count * sizeof(T));
    return static_cast<T*>(bytes);
  }
  CUresult launch_with(CUfunction entry, CUstream queue, unsigned grid, unsigned block, std::vector<void*> parameters) {
    return driver.f_cuLaunchKernel(entry, grid, 1, 1, block, 1, 1, 0, queue, parameters.data(), nullptr);
  }
  CUresult digest(CUstream queue, uint64_t* addresses, kernels::BlockReport* reports, uint32_t count,
                  uint32_t grid = 0) {
    uint64_t low = kSeed.low, high = kSeed.high;
    return launch_with(function(module(), kernels::kDigestEntry), queue, grid == 0 ? count : grid, kernels::kThreads,
                       {&addresses, &reports, &low, &high, &count});
  }
  CUresult digest_rows(uint64_t* addresses, kernels::BlockReport* reports, uint32_t count, unsigned rows,
                       unsigned layers = 1) {
    uint64_t low = kSeed.low, high = kSeed.high;
    std::vector<void*> parameters{&addresses, &reports, &low, &high, &count};
    return driver.f_cuLaunchKernel(function(module(), kernels::kDigestEntry), count, rows, layers, kernels::kThreads, 1,
                                   1, 0, nullptr, parameters.data(), nullptr);
  }
  CUresult fill(CUstream queue, kernels::BlockFill* fills, uint32_t count) {
    return launch_with(function(module(), kernels::kFillEntry), queue, count, kernels::kThreads, {&fills, &count});
  }
  CUmodule module() {
    if (module_ == nullptr) module_ = load();
    return module_;
  }
  CUresult load_code(const char* image) {
    CUmodule unused = nullptr;
    return driver.f_cuModuleLoadData(&unused, image);
  }
  static kernels::BlockReport expected(CUdeviceptr address) {
    return kernels::digest_block(reinterpret_cast<const std::byte*>(address), kSeed);
  }

 private:
  CUmodule module_ = nullptr;
};

TEST_F(SimKernels, BlocksAreFilledAndDigestedAsOnTheProcessor) {
  const CUdeviceptr address = mapped(3 * kGranule);
  const CUstream queue = stream();
  auto* fills = pinned<kernels::BlockFill>(2);
  fills[0] = {address, {1, 2}};
  fills[1] = {address + 2 * kGranule, {3, 4}};
  ASSERT_EQ(fill(queue, fills, 2), CUDA_SUCCESS);
  auto* addresses = pinned<uint64_t>(3);
  auto* reports = pinned<kernels::BlockReport>(3);
  for (uint64_t index = 0; index < 3; ++index) addresses[index] = address + index * kGranule;
  ASSERT_EQ(digest(queue, addresses, reports, 3), CUDA_SUCCESS);
  EXPECT_EQ(*bytes_at(address), '\0') << "launches are late";
  EXPECT_EQ(reports[0], kernels::BlockReport{});
  ASSERT_EQ(driver.f_cuStreamSynchronize(queue), CUDA_SUCCESS);
  for (size_t index = 0; index < 3; ++index) EXPECT_EQ(reports[index], expected(addresses[index])) << index;
  EXPECT_EQ(reports[0].value, (kernels::Value{1, 2}));
  EXPECT_EQ(reports[1].value, (kernels::Value{0, 0})) << "between them nothing was written";
  EXPECT_EQ(reports[2].value, (kernels::Value{3, 4}));
  EXPECT_EQ(reports[1].is_constant, 1u);
}

TEST_F(SimKernels, AGridWithARowForEachSectionReportsSections) {
  const CUdeviceptr address = mapped(2 * kGranule);
  for (uint64_t word = 0; word < 2 * kGranule / sizeof word; ++word)
    std::memcpy(bytes_at(address) + word * sizeof word, &word, sizeof word);
  auto* addresses = pinned<uint64_t>(2);
  auto* sections = pinned<kernels::BlockReport>(2 * kernels::kSections);
  addresses[0] = address + kGranule;
  addresses[1] = address;
  ASSERT_EQ(digest_rows(addresses, sections, 2, kernels::kSections), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
  for (uint32_t index = 0; index < 2; ++index) {
    EXPECT_EQ(kernels::join_sections(sections + index * kernels::kSections, kSeed), expected(addresses[index]));
    EXPECT_EQ(sections[index * kernels::kSections + 3],
              kernels::digest_section(reinterpret_cast<const std::byte*>(addresses[index]), 3, kSeed));
  }
  for (const unsigned rows : {2U, kernels::kSections - 1, kernels::kSections + 1})
    EXPECT_EQ(digest_rows(addresses, sections, 1, rows), CUDA_ERROR_INVALID_VALUE) << rows;
  EXPECT_EQ(digest_rows(addresses, sections, 1, 1, 2), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SimKernels, ListsMayLieOnTheDeviceAndBlocksInPinnedMemory) {
  const CUdeviceptr lists = mapped();
  auto* block = pinned<std::byte>(kernels::kBlockBytes);
  kernels::fill_block(block, {5, 6});
  auto* addresses = reinterpret_cast<uint64_t*>(lists);
  addresses[0] = reinterpret_cast<uint64_t>(block);
  auto* reports = reinterpret_cast<kernels::BlockReport*>(lists + 4096);
  ASSERT_EQ(digest(nullptr, addresses, reports, 1), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(reports[0], expected(addresses[0]));
}

TEST_F(SimKernels, ParametersAreReadAtTheLaunchAndGridsBoundTheList) {
  auto* addresses = pinned<uint64_t>(2);
  auto* reports = pinned<kernels::BlockReport>(2);
  addresses[0] = addresses[1] = mapped();
  ASSERT_EQ(digest(nullptr, addresses, reports, 2, 1), CUDA_SUCCESS);
  ASSERT_EQ(digest(nullptr, addresses, reports + 1, 1, 5), CUDA_SUCCESS) << "five CTAs, four with nothing to do";
  ASSERT_EQ(driver.f_cuCtxSynchronize(), CUDA_SUCCESS);
  EXPECT_EQ(reports[0].is_constant, 1u);
  EXPECT_EQ(reports[1], reports[0]);
}

struct BadAddress {
  const char* what;
  CUresult code;
};

TEST_F(SimKernels, ABadAddressHarmsTheContext) {
  for (const BadAddress& bad : {BadAddress{"unmapped block", CUDA_ERROR_ILLEGAL_ADDRESS},
                                BadAddress{"block half unmapped", CUDA_ERROR_ILLEGAL_ADDRESS},
                                BadAddress{"misaligned block", CUDA_ERROR_MISALIGNED_ADDRESS},
                                BadAddress{"pageable list", CUDA_ERROR_ILLEGAL_ADDRESS},
                                BadAddress{"pageable reports", CUDA_ERROR_ILLEGAL_ADDRESS}}) {
    SCOPED_TRACE(bad.what);
    control.reset();
    start();
    const CUmodule fresh = load();
    const std::string what = bad.what;
    std::vector<uint64_t> pageable(64);
    uint64_t* addresses = what == "pageable list" ? pageable.data() : pinned<uint64_t>();
    addresses[0] = mapped();
    if (what == "unmapped block") addresses[0] = reserve(kGranule);
    if (what == "block half unmapped") addresses[0] += kGranule / 2;
    if (what == "misaligned block") addresses[0] += 8;
    auto* reports = what == "pageable reports" ? reinterpret_cast<kernels::BlockReport*>(pageable.data())
                                               : pinned<kernels::BlockReport>();
    uint64_t seed = 0;
    uint32_t count = 1;
    ASSERT_EQ(launch_with(function(fresh, kernels::kDigestEntry), nullptr, 1, kernels::kThreads,
                          {&addresses, &reports, &seed, &seed, &count}),
              CUDA_SUCCESS)
        << "found out when it runs, not when it is launched";
    EXPECT_EQ(driver.f_cuCtxSynchronize(), bad.code);
    EXPECT_EQ(driver.f_cuCtxSynchronize(), bad.code) << "it stays";
  }
}

TEST_F(SimKernels, AFillOfABadAddressHarmsTheContext) {
  for (const auto& [offset, code] :
       {std::pair{kGranule, CUDA_ERROR_ILLEGAL_ADDRESS}, std::pair{uint64_t{8}, CUDA_ERROR_MISALIGNED_ADDRESS}}) {
    control.reset();
    start();
    const CUfunction entry = function(load(), kernels::kFillEntry);
    auto* fills = pinned<kernels::BlockFill>();
    fills[0] = {mapped() + offset, {1, 1}};
    uint32_t count = 1;
    ASSERT_EQ(launch_with(entry, nullptr, 1, kernels::kThreads, {&fills, &count}), CUDA_SUCCESS);
    EXPECT_EQ(driver.f_cuCtxSynchronize(), code);
  }
}

TEST_F(SimKernels, AFillOfAListThatHasGoneHarmsTheContext) {
  auto* pageable = new kernels::BlockFill;
  ASSERT_EQ(fill(nullptr, pageable, 1), CUDA_SUCCESS);
  EXPECT_EQ(driver.f_cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  delete pageable;
}

TEST_F(SimKernels, ImagesThatAreNoneAreRefused) {
  const char* const good = ".version 7.0\n.target sm_60\n.address_size 64\n.visible .entry own(.param .u64 x) { ret; }";
  EXPECT_EQ(load_code(nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(load_code(""), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(load_code("\x7f"
                      "ELF"),
            CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(load_code(".version 7.0\n"), CUDA_ERROR_INVALID_PTX);
  EXPECT_EQ(load_code(".version 9.9\n.target sm_60\n"), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  EXPECT_EQ(load_code("// .entry ebbtide_fill_blocks(\n /* .version 99.0 */ .version 7.0 .target sm_60"), CUDA_SUCCESS);
  control.set_driver_version(12000);
  EXPECT_EQ(load_code(kernels::ptx()), CUDA_SUCCESS) << "CUDA 12.0 is the oldest that must take it";
  EXPECT_EQ(load_code(".version 8.1\n.target sm_60\n"), CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  const CUmodule unknown = load(good);
  const CUfunction own = function(unknown, "own");
  uint64_t parameter = 0;
  EXPECT_EQ(launch_with(own, nullptr, 1, kernels::kThreads, {&parameter}), CUDA_ERROR_NOT_SUPPORTED)
      << "the simulator knows two kernels, and no other";
}

TEST_F(SimKernels, AModuleTakesItsFunctionsAlong) {
  const CUmodule one = load();
  EXPECT_EQ(live().modules, 1u);
  const CUfunction entry = function(one, kernels::kFillEntry);
  EXPECT_EQ(function(one, kernels::kFillEntry), entry) << "asked for again it is the same";
  CUfunction none = nullptr;
  EXPECT_EQ(driver.f_cuModuleGetFunction(&none, nullptr, kernels::kFillEntry), CUDA_ERROR_INVALID_HANDLE);
  ASSERT_EQ(driver.f_cuModuleUnload(one), CUDA_SUCCESS);
  EXPECT_EQ(live().modules, 0u);
  EXPECT_EQ(driver.f_cuModuleUnload(one), CUDA_ERROR_INVALID_HANDLE);
  uint32_t count = 0;
  uint64_t fills = 0;
  EXPECT_EQ(launch_with(entry, nullptr, 1, kernels::kThreads, {&fills, &count}), CUDA_ERROR_INVALID_HANDLE);
  load();
  ASSERT_EQ(driver.f_cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  EXPECT_EQ(live().modules, 0u) << "the context's end is theirs";
}

TEST_F(SimKernels, AFunctionWantsAStreamOfItsOwnContext) {
  control.reset();
  control.set_device_count(2);
  start();
  const CUfunction entry = function(load(), kernels::kFillEntry);
  CUcontext second = nullptr;
  ASSERT_EQ(driver.f_cuDevicePrimaryCtxRetain(&second, 1), CUDA_SUCCESS);
  ASSERT_EQ(driver.f_cuCtxSetCurrent(second), CUDA_SUCCESS);
  uint32_t count = 0;
  uint64_t fills = 0;
  EXPECT_EQ(launch_with(entry, stream(), 1, kernels::kThreads, {&fills, &count}), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(SimKernels, LaunchesThatWouldGiveNonsenseAreRefused) {
  const CUfunction entry = function(module(), kernels::kFillEntry);
  uint32_t count = 0;
  uint64_t fills = 0;
  EXPECT_EQ(launch_with(entry, nullptr, 1, 256, {&fills, &count}), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuLaunchKernel(entry, 1, 1, 1, 2, 256, 1, 0, nullptr, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.f_cuLaunchKernel(entry, 1, 1, 1, 512, 1, 1, 0, nullptr, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  void* extra[] = {nullptr};
  EXPECT_EQ(driver.f_cuLaunchKernel(entry, 1, 1, 1, 512, 1, 1, 0, nullptr, nullptr, extra), CUDA_ERROR_NOT_SUPPORTED);
  void* parameters[] = {&fills, &count};
  EXPECT_EQ(driver.f_cuLaunchKernel(entry, 1, 1, 1, 512, 1, 1, 1 << 20, nullptr, parameters, nullptr),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SimKernels, LoadingBreaksACapture) {
  const CUstream queue = stream();
  ASSERT_EQ(driver.f_cuStreamBeginCapture(queue, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  EXPECT_EQ(load_code(kernels::ptx()), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CUgraph graph = nullptr;
  EXPECT_EQ(driver.f_cuStreamEndCapture(queue, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

}  // namespace
}  // namespace ebbtide::testing
