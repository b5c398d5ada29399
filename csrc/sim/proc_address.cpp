// cuGetProcAddress, in the two shapes that clients request: 4 arguments since 11.3, 5 arguments since 12.0.
#include <atomic>
#include <cstring>
#include <span>

#include "base/log.h"
#include "sim/entry.h"
#include "sim/rules.h"
#include "sim/simulator.h"

#undef cuGetProcAddress

EBBTIDE_SIM_EXPORT CUresult cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags);
EBBTIDE_SIM_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                                                CUdriverProcAddressQueryResult* symbolStatus);
// programs.cpp
EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v2(CUcontext*, unsigned int, CUdevice) asm("cuCtxCreate_v2");
EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v3(CUcontext*, void*, int, unsigned int, CUdevice) asm("cuCtxCreate_v3");
EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v4(CUcontext*, void*, unsigned int, CUdevice) asm("cuCtxCreate_v4");
EBBTIDE_SIM_EXPORT decltype(cuMemAllocAsync) cuMemAllocAsync_ptsz;
EBBTIDE_SIM_EXPORT decltype(cuMemAllocFromPoolAsync) cuMemAllocFromPoolAsync_ptsz;
EBBTIDE_SIM_EXPORT decltype(cuMemFreeAsync) cuMemFreeAsync_ptsz;

namespace ebbtide::sim {
namespace {

struct Function {
  const char* name;
  int least_version;
  void* address;
};

const Function kFunctions[] = {
    // The newest shape comes first, because look_up_in() takes the first entry whose least version is met.
    {"cuGetProcAddress", 12000, reinterpret_cast<void*>(&cuGetProcAddress_v2)},
    {"cuGetProcAddress", 11030,
     reinterpret_cast<void*>(static_cast<CUresult (*)(const char*, void**, int, cuuint64_t)>(&cuGetProcAddress))},
    {"cuCtxCreate", 12050, reinterpret_cast<void*>(&ebbtide_context_v4)},
    {"cuCtxCreate", 11040, reinterpret_cast<void*>(&ebbtide_context_v3)},
    {"cuCtxCreate", 3020, reinterpret_cast<void*>(&ebbtide_context_v2)},
#define EBBTIDE_FUNCTION(name, least_version, ...) {#name, least_version, reinterpret_cast<void*>(&name)},
#include "driver/functions.def"
#include "sim/program_functions.def"
#undef EBBTIDE_FUNCTION
};

// Applies to requests with the flag of per-thread default streams. Functions that are not in this list have no variant.
// Functions older than CUDA 7 have had one since CUDA 7: a request for an older version finds nothing.
constexpr int kFirstPerThread = 7000;
#define EBBTIDE_SIM_PER_THREAD(name) {#name, kFirstPerThread, reinterpret_cast<void*>(&name)}
const Function kPerThreadFunctions[] = {
    {"cuMemAllocAsync", 11020, reinterpret_cast<void*>(&cuMemAllocAsync_ptsz)},
    {"cuMemAllocFromPoolAsync", 11020, reinterpret_cast<void*>(&cuMemAllocFromPoolAsync_ptsz)},
    {"cuMemFreeAsync", 11020, reinterpret_cast<void*>(&cuMemFreeAsync_ptsz)},
    // The simulator has no variant of these, so it hands out the plain function.
    EBBTIDE_SIM_PER_THREAD(cuMemcpyHtoD),
    EBBTIDE_SIM_PER_THREAD(cuMemcpyDtoH),
    EBBTIDE_SIM_PER_THREAD(cuMemcpyHtoDAsync),
    EBBTIDE_SIM_PER_THREAD(cuMemcpyDtoHAsync),
    EBBTIDE_SIM_PER_THREAD(cuMemcpyDtoDAsync),
    EBBTIDE_SIM_PER_THREAD(cuMemcpy),
    EBBTIDE_SIM_PER_THREAD(cuMemcpyAsync),
    EBBTIDE_SIM_PER_THREAD(cuMemcpyDtoD),
    EBBTIDE_SIM_PER_THREAD(cuMemsetD8),
    EBBTIDE_SIM_PER_THREAD(cuMemsetD16),
    EBBTIDE_SIM_PER_THREAD(cuMemsetD32),
    EBBTIDE_SIM_PER_THREAD(cuMemsetD8Async),
    EBBTIDE_SIM_PER_THREAD(cuMemsetD16Async),
    EBBTIDE_SIM_PER_THREAD(cuMemsetD32Async),
    EBBTIDE_SIM_PER_THREAD(cuLaunchKernel),
    EBBTIDE_SIM_PER_THREAD(cuStreamSynchronize),
    EBBTIDE_SIM_PER_THREAD(cuStreamQuery),
    EBBTIDE_SIM_PER_THREAD(cuStreamWaitEvent),
    EBBTIDE_SIM_PER_THREAD(cuEventRecord),
};
#undef EBBTIDE_SIM_PER_THREAD

constexpr cuuint64_t kKnownFlags = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;

CUdriverProcAddressQueryResult look_up_in(std::span<const Function> functions, const char* symbol, int version,
                                          int driver_version, void** address) {
  auto status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  for (const Function& function : functions) {
    if (std::strcmp(function.name, symbol) != 0 || function.least_version > driver_version) continue;
    if (version >= function.least_version) {
      *address = function.address;
      return CU_GET_PROC_ADDRESS_SUCCESS;
    }
    status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
  }
  return status;
}

// The CUDA runtime asks for this table at its start, and gives up without it.
void explain_the_runtimes_error(const char* symbol) {
  static std::atomic<bool> is_said{false};
  if (std::strcmp(symbol, "cuGetExportTable") != 0 || is_said.exchange(true)) return;
  log_line(LogLevel::kWarning,
           {"this program uses the CUDA runtime, as torch's CUDA builds do, and will find no device: the simulated "
            "device serves programs of the driver API only. Run this one on a GPU"});
}

CUdriverProcAddressQueryResult look_up(const char* symbol, int version, cuuint64_t flags, void** address) {
  int driver_version;
  {
    Lock lock(simulator().mutex);
    driver_version = simulator().driver_version;
  }
  if (rules().is_hidden(symbol)) return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if ((flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0) {
    const auto status = look_up_in(kPerThreadFunctions, symbol, version, driver_version, address);
    if (status != CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) return status;
  }
  const auto status = look_up_in(kFunctions, symbol, version, driver_version, address);
  if (status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) explain_the_runtimes_error(symbol);
  return status;
}

CUresult get_address(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                     CUdriverProcAddressQueryResult* symbolStatus) {
  if (symbol == nullptr || pfn == nullptr || (flags & ~kKnownFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  *pfn = nullptr;
  const auto status = look_up(symbol, cudaVersion, flags, pfn);
  // In this shape, an unknown name is not an error, whether or not the caller wants the status.
  if (symbolStatus != nullptr) *symbolStatus = status;
  return CUDA_SUCCESS;
}

CUresult get_address_legacy(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags) {
  void* found = nullptr;
  const CUresult result = get_address(symbol, pfn == nullptr ? nullptr : &found, cudaVersion, flags, nullptr);
  if (found != nullptr) *pfn = found;
  return result == CUDA_SUCCESS && found == nullptr ? CUDA_ERROR_NOT_FOUND : result;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags) {
  EBBTIDE_SIM_FORWARD(cuGetProcAddress, kAnytime, get_address_legacy, symbol, pfn, cudaVersion, flags);
}

EBBTIDE_SIM_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                                                CUdriverProcAddressQueryResult* symbolStatus) {
  EBBTIDE_SIM_FORWARD(cuGetProcAddress_v2, kAnytime, get_address, symbol, pfn, cudaVersion, flags, symbolStatus);
}
