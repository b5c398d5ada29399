#include "preload/managed_memory.h"

#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"
#include "core/saver.h"
#include "preload/counted_memory.h"
#include "preload/resolver.h"

namespace ebbtide::preload {
namespace {

// As CUDA 8 has them, which every later driver still hands out: cuda.h's own types changed with CUDA 13.
using Advise = CUresult (*)(CUdeviceptr, size_t, CUmem_advise, CUdevice);
using Prefetch = CUresult (*)(CUdeviceptr, size_t, CUdevice, CUstream);
constexpr int kHintsVersion = 8000;

template <typename Function>
Function find_hint(const char* name) {
  const auto resolve = real<&cuGetProcAddress_v2>();
  void* found = nullptr;
  if (resolve != nullptr) resolve(name, &found, kHintsVersion, CU_GET_PROC_ADDRESS_DEFAULT, nullptr);
  return reinterpret_cast<Function>(found);
}

// Near the device, and reachable from it where it is not. Hints: a driver without them works, slower.
void give_hints(int device, CUdeviceptr address, uint64_t size_bytes, bool is_room) {
  if (const auto advise = find_hint<Advise>("cuMemAdvise")) {
    advise(address, size_bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device);
    advise(address, size_bytes, CU_MEM_ADVISE_SET_ACCESSED_BY, device);
  }
  const auto prefetch = is_room ? find_hint<Prefetch>("cuMemPrefetchAsync") : nullptr;
  if (prefetch != nullptr) prefetch(address, size_bytes, device, CU_STREAM_PER_THREAD);
}

void note_managed(Saver& saver, int device, uint64_t size_bytes) {
  saver.counters.bytes_spilled += size_bytes;
  if (saver.counters.spills++ != 0) return;
  log_line(LogLevel::kWarning,
           {"device ", std::to_string(device), " is full: ", format_bytes(size_bytes),
            " become managed memory, whose pages move between device and host. Said once; saver.stats() counts on"});
}

}  // namespace

CUresult allocate_managed(int device, uint64_t size_bytes, CUdeviceptr* address) {
  const auto allocate = real<&cuMemAllocManaged>();
  if (allocate == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  Saver& saver = Saver::instance();
  const bool is_room = usable_device_bytes(saver, device) >= size_bytes;
  HostClaim claim = saver.host_budget.claim_uncharged(size_bytes, "managed memory of the program");
  auto entry = CountedMemory::make_entry({{}, std::move(claim)});
  const CUresult result = allocate(address, size_bytes, CU_MEM_ATTACH_GLOBAL);
  if (result != CUDA_SUCCESS) return result;
  give_hints(device, *address, size_bytes, is_room);
  note_managed(saver, device, size_bytes);
  counted_addresses().keep(*address, std::move(entry));
  return CUDA_SUCCESS;
}

}  // namespace ebbtide::preload
