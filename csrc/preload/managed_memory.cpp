#include "preload/managed_memory.h"

#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"
#include "core/allocate/room.h"
#include "core/state/core.h"
#include "driver/context.h"
#include "preload/allocate.h"
#include "preload/memory_map.h"
#include "preload/placed_memory.h"
#include "preload/resolver.h"

namespace ebbtide::preload {
namespace {

// Whether nothing is left to free: the block ended with its context, or the driver with the process.
bool is_gone(CUresult result) {
  return result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_CONTEXT ||
         result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_DEINITIALIZED;
}

// False where it must be put off.
bool try_free(CUdeviceptr address, const ManagedBlock& block, bool may_wait) noexcept {
  try {
    const ContextScope scope(block.device);
    const auto permit = Core::instance().deferred_frees.try_enter(block.device, may_wait);
    if (!permit || !wait_before_free(block.other_contexts)) return false;
    // Never by cuMemFreeAsync: the driver has none for managed memory.
    const CUresult result = real<&cuMemFree_v2>()(address);
    if (result == CUDA_SUCCESS || is_gone(result)) return true;
    log_line(LogLevel::kInfo, {"a free is put off: cuMemFree failed with ", result_name(result)});
  } catch (const std::exception& error) {
    log_line(LogLevel::kInfo, {"a free is put off: ", error.what()});
  }
  return false;
}

bool retry_frees(bool may_wait) noexcept {
  auto taken = records().put_off.take_all();
  bool has_freed = false;
  while (!taken.empty()) {
    auto entry = taken.extract(taken.begin());
    const CUdeviceptr address = entry.key();
    if (try_free(address, entry.mapped().held, may_wait)) {
      has_freed = true;
    } else {
      records().put_off.keep(address, std::move(entry));
    }
  }
  return has_freed;
}
size_t count_put_off() noexcept { return records().put_off.count(); }
constexpr MoreFrees kManagedFrees{&retry_frees, &count_put_off};

// The types of CUDA 8, which every later driver still provides: cuda.h's own types changed with CUDA 13.
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

}  // namespace

CUresult allocate_managed(int device, uint64_t size_bytes, CUdeviceptr* address) {
  const auto allocate = real<&cuMemAllocManaged>();
  if (allocate == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  const bool is_room = usable_device_bytes(Core::instance(), device, size_bytes) >= size_bytes;
  auto entry = records().managed.make_entry(
      {device, charge_host(device, size_bytes, "managed memory of the program"), {own_context(device)}});
  const CUresult result = allocate(address, size_bytes, CU_MEM_ATTACH_GLOBAL);
  if (result != CUDA_SUCCESS) return result;
  give_hints(device, *address, size_bytes, is_room);
  forget_managed(*address);
  records().addresses.take(*address);
  records().managed.keep(*address, std::move(entry));
  note_spill(device, size_bytes, [&] {
    return format_bytes(size_bytes) + " become managed memory, whose pages move between device and host";
  });
  return CUDA_SUCCESS;
}

bool is_managed(CUdeviceptr address) noexcept { return records().managed.has(address); }

std::optional<CUresult> free_managed(CUdeviceptr address) {
  auto entry = records().managed.take(address);
  // Freed before, and only put off.
  if (entry.empty() && records().put_off.has(address)) return CUDA_ERROR_INVALID_VALUE;
  if (entry.empty()) return std::nullopt;
  ManagedBlock& block = entry.mapped().held;
  const CUcontext own = own_context(block.device);
  if (own != block.other_contexts[0]) block.other_contexts[1] = own;
  if (try_free(address, block, false)) return CUDA_SUCCESS;
  Core::instance().deferred_frees.retry_also(kManagedFrees);
  records().put_off.keep(address, std::move(entry));
  return CUDA_SUCCESS;
}

void forget_managed(CUdeviceptr address) noexcept {
  records().managed.take(address);
  records().put_off.take(address);
}

}  // namespace ebbtide::preload
