#include "vmm/deferred_undos.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "vmm/address_arena.h"

namespace ebbtide::deferred_undos {
namespace {

enum class Kind { kUnmap, kRelease, kAddressFree, kHostFree, kHostUnregister };

struct Undo {
  Kind kind;
  uint64_t object;  // address or handle
  size_t size_bytes = 0;
  int device = -1;
  CUmemGenericAllocationHandle handle = 0;  // the memory that is held meanwhile, if any
  void* mapping = nullptr;                  // the host memory that is held meanwhile, of size_bytes, if any
};

struct State {
  std::mutex mutex;
  std::vector<Undo> undos;
  std::list<Addresses> addresses;
  std::atomic<size_t> count{0};
};
State& state() {
  static State* const instance = new State;
  return *instance;
}

void add(Undo undo) noexcept {
  try {
    const std::lock_guard lock(state().mutex);
    state().undos.push_back(undo);
    state().count.store(state().undos.size());
  } catch (...) {
    log_line(LogLevel::kWarning, {"a driver object could not be given back and not be remembered: it leaks"});
  }
}

CUresult unregister(const Driver& table, const Undo& undo) {
  const CUresult result = table.cuMemHostUnregister(reinterpret_cast<void*>(undo.object));
  if (!is_unregistered(result)) return result;
  ::munmap(undo.mapping, undo.size_bytes);
  return CUDA_SUCCESS;
}

CUresult perform(const Driver& table, const Undo& undo) {
  switch (undo.kind) {
    case Kind::kUnmap: return table.cuMemUnmap(undo.object, undo.size_bytes);
    case Kind::kRelease: return table.cuMemRelease(undo.object);
    case Kind::kAddressFree: return table.cuMemAddressFree(undo.object, undo.size_bytes);
    case Kind::kHostFree: return table.cuMemFreeHost(reinterpret_cast<void*>(undo.object));
    case Kind::kHostUnregister: return unregister(table, undo);
  }
  return CUDA_SUCCESS;
}

bool is_mapped(CUdeviceptr address, size_t size_bytes) {
  return std::any_of(state().undos.begin(), state().undos.end(), [&](const Undo& undo) {
    return undo.kind == Kind::kUnmap && undo.object < address + size_bytes && address < undo.object + undo.size_bytes;
  });
}

bool is_host_memory(const Undo& undo) { return undo.kind == Kind::kHostFree || undo.kind == Kind::kHostUnregister; }

}  // namespace

void add_unmap(CUdeviceptr address, size_t size_bytes, CUmemGenericAllocationHandle handle, int device) noexcept {
  add({Kind::kUnmap, address, size_bytes, device, handle});
}
void add_release(CUmemGenericAllocationHandle handle, size_t size_bytes, int device) noexcept {
  add({Kind::kRelease, handle, size_bytes, device, handle});
}
void add_address_free(CUdeviceptr address, size_t size_bytes) noexcept {
  add({Kind::kAddressFree, address, size_bytes});
}

bool keep_if_mapped(Addresses& addresses) noexcept {
  if (count() == 0) return false;
  std::list<Addresses> kept;
  try {
    kept.emplace_back();
  } catch (...) {
    // No memory to remember them by.
  }
  const std::lock_guard lock(state().mutex);
  if (!is_mapped(addresses.address(), addresses.size_bytes())) return false;
  if (kept.empty()) {
    addresses.leak();
    log_line(LogLevel::kWarning, {"addresses could not be given back and not be remembered: they leak"});
  } else {
    kept.front() = std::move(addresses);
    state().addresses.splice(state().addresses.end(), kept);
  }
  return true;
}

void add_host_free(void* bytes) noexcept { add({Kind::kHostFree, reinterpret_cast<uint64_t>(bytes)}); }
void add_host_unregister(void* bytes, void* mapping, size_t mapping_bytes) noexcept {
  add({.kind = Kind::kHostUnregister,
       .object = reinterpret_cast<uint64_t>(bytes),
       .size_bytes = mapping_bytes,
       .mapping = mapping});
}

bool is_unregistered(CUresult result) noexcept {
  return result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED ||
         result == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

void retry(bool may_free_host_memory) noexcept {
  if (count() == 0) return;
  const Driver* table = driver_if_loaded();
  if (table == nullptr) return;
  std::list<Addresses> free;  // go outside the lock
  const std::lock_guard lock(state().mutex);
  std::vector<Undo>& undos = state().undos;
  // In place and in order: needs no memory.
  std::erase_if(undos, [&](const Undo& undo) {
    if (is_host_memory(undo) && !may_free_host_memory) return false;
    const CUresult result = perform(*table, undo);
    return result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED;
  });
  state().count.store(undos.size());
  std::list<Addresses>& kept = state().addresses;
  for (auto next = kept.begin(); next != kept.end();) {
    const auto each = next++;
    if (!is_mapped(each->address(), each->size_bytes())) free.splice(free.end(), kept, each);
  }
}

size_t count() noexcept { return state().count.load(); }

uint64_t held_bytes(int device) noexcept {
  if (count() == 0) return 0;
  const std::lock_guard lock(state().mutex);
  const std::vector<Undo>& undos = state().undos;
  // One handle may wait for both its unmap and its release: the unmap comes first, and counts.
  const auto is_counted = [&](const Undo& undo) {
    return undo.kind == Kind::kUnmap || std::none_of(undos.begin(), undos.end(), [&](const Undo& other) {
             return other.kind == Kind::kUnmap && other.handle == undo.handle;
           });
  };
  uint64_t total = 0;
  for (const Undo& undo : undos) {
    if (undo.handle != 0 && undo.device == device && is_counted(undo)) total += undo.size_bytes;
  }
  return total;
}

}  // namespace ebbtide::deferred_undos
