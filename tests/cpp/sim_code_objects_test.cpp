// Offload bundles, which the simulator loads by HIP's name, as HIP does. The simulated device is a gfx942.
#include <cstring>
#include <string>

#include "kernels/blocks.h"
#include "sim_fixture.h"

namespace ebbtide::testing {
namespace {

const std::string kOwnTarget = "hipv4-amdgcn-amd-amdhsa--gfx942";

void append(std::string& bytes, uint64_t number) { bytes.append(reinterpret_cast<const char*>(&number), 8); }

// A bundle of one entry, which lies at offset 4096.
std::string bundle_of(const std::string& target, const std::string& code) {
  std::string bundle = "__CLANG_OFFLOAD_BUNDLE__";
  append(bundle, 1);
  append(bundle, 4096);
  append(bundle, code.size());
  append(bundle, target.size());
  bundle += target;
  bundle.resize(4096);
  return bundle + code;
}

// Of the library's bundle.
std::string own_code() {
  const char* const bundle = static_cast<const char*>(kernels::code_objects());
  const std::string table(bundle, 4096);
  const size_t name = table.find(kOwnTarget);
  EXPECT_NE(name, std::string::npos);
  uint64_t place[2];
  std::memcpy(place, bundle + name - 24, sizeof place);
  return {bundle + place[0], place[1]};
}

class SimCodeObjects : public SimTest {
 protected:
  CUresult load(const void* image) { return load_(&module_, image); }
  CUresult load(const std::string& image) { return load(image.data()); }
  CUresult find(const char* name) {
    CUfunction function = nullptr;
    return find_(&function, module_, name);
  }

 private:
  decltype(cuModuleLoadData)* load_ = sim_function<decltype(cuModuleLoadData)>("hipModuleLoadData");
  decltype(cuModuleGetFunction)* find_ = sim_function<decltype(cuModuleGetFunction)>("hipModuleGetFunction");
  CUmodule module_ = nullptr;
};

TEST_F(SimCodeObjects, TheLibrarysBundleHasTheKernels) {
  ASSERT_EQ(load(kernels::code_objects()), CUDA_SUCCESS);
  for (const char* entry : {kernels::kDigestEntry, kernels::kFillEntry, kernels::kDeliverEntry}) {
    EXPECT_EQ(find(entry), CUDA_SUCCESS) << entry;
  }
  EXPECT_EQ(find("ebbtide_digest_blocks.kd"), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(kernels::code_objects()) % 4096, 0u);
}

TEST_F(SimCodeObjects, ImagesThatHipWouldRefuseAreRefused) {
  EXPECT_EQ(load(nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(load(""), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(load(kernels::ptx()), CUDA_ERROR_INVALID_IMAGE) << "PTX is CUDA's";
  EXPECT_EQ(load(bundle_of("hipv4-amdgcn-amd-amdhsa--gfx90a", own_code())), CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(load(bundle_of("host-x86_64-unknown-linux-gnu-", "")), CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(load(bundle_of(kOwnTarget, "")), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(load(bundle_of(kOwnTarget, std::string(4096, 'x'))), CUDA_ERROR_INVALID_IMAGE);
  CUmodule module = nullptr;
  EXPECT_EQ(driver.f_cuModuleLoadData(&module, kernels::code_objects()), CUDA_ERROR_INVALID_IMAGE) << "and this HIP's";
}

TEST_F(SimCodeObjects, AFileThatIsCutHasNoKernels) {
  const std::string code = own_code();
  ASSERT_EQ(load(bundle_of(kOwnTarget, code)), CUDA_SUCCESS);
  EXPECT_EQ(find(kernels::kFillEntry), CUDA_SUCCESS);
  for (size_t size = 64; size < code.size(); size += code.size() / 16) {
    ASSERT_EQ(load(bundle_of(kOwnTarget, code.substr(0, size))), CUDA_SUCCESS) << size;
    EXPECT_EQ(find(kernels::kFillEntry), CUDA_ERROR_NOT_FOUND) << size;
  }
}

TEST_F(SimCodeObjects, ALoadIsCountedAndFailsOnDemand) {
  control.fail("cuModuleLoadData", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
  EXPECT_EQ(load(kernels::code_objects()), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(load(kernels::code_objects()), CUDA_SUCCESS);
  EXPECT_EQ(control.calls("cuModuleLoadData"), 2u);
}

}  // namespace
}  // namespace ebbtide::testing
