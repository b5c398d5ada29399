#include "vmm/deferred_undos.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "vmm/address_arena.h"
#include "vmm/held_addresses.h"
#include "vmm/late_memory.h"

namespace ebbtide {
namespace {

using Kind = Undo::Kind;

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

// The end of the driver or of its context unpins, too.
CUresult unregister(const Driver& table, const Undo& undo) {
  const CUresult result = table.cuMemHostUnregister(reinterpret_cast<void*>(undo.object));
  if (!is_undone(result) && result != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) return result;
  ::munmap(undo.mapping, undo.size_bytes);
  return CUDA_SUCCESS;
}

// Changes it to what is left where it is done in part.
CUresult perform(Undo& undo) {
  const Driver& table = *driver_if_loaded();
  switch (undo.kind) {
    case Kind::kUnmap: {
      const CUresult result = table.cuMemUnmap(undo.object, undo.size_bytes);
      if (!undo.is_lent || !is_undone(result)) return result;
      undo.kind = Kind::kTakeBack;
      [[fallthrough]];
    }
    case Kind::kTakeBack: return held_addresses::take_back(undo.object, undo.size_bytes);
    case Kind::kLetGo: held_addresses::let_go(undo.object, undo.size_bytes); break;
    case Kind::kRelease: {
      const int device = undo.is_import ? -1 : undo.device;
      late_memory::before_release(device, undo.size_bytes);
      const CUresult result = table.cuMemRelease(undo.object);
      if (!is_undone(result)) late_memory::after_refusal(device, undo.size_bytes);
      return result;
    }
    case Kind::kAddressFree: return table.cuMemAddressFree(undo.object, undo.size_bytes);
    case Kind::kHostFree: return table.cuMemFreeHost(reinterpret_cast<void*>(undo.object));
    case Kind::kHostUnregister: return unregister(table, undo);
    case Kind::kNone: break;
  }
  return CUDA_SUCCESS;
}

bool is_of_mapping(const Undo& undo) { return undo.kind == Kind::kUnmap || undo.kind == Kind::kTakeBack; }

bool is_mapped(CUdeviceptr address, size_t size_bytes) {
  return std::any_of(state().undos.begin(), state().undos.end(), [&](const Undo& undo) {
    return is_of_mapping(undo) && undo.object < address + size_bytes && address < undo.object + undo.size_bytes;
  });
}

bool is_host_memory(const Undo& undo) { return undo.kind == Kind::kHostFree || undo.kind == Kind::kHostUnregister; }

}  // namespace

void Undo::undo() const noexcept {
  Undo left = *this;
  const CUresult result = perform(left);
  if (is_undone(result)) return;
  log_line(LogLevel::kInfo,
           {"a driver object could not be given back (", result_name(result), "): it will be tried again"});
  deferred_undos::keep(left);
}

namespace deferred_undos {

void keep(const Undo& undo) noexcept {
  try {
    const std::lock_guard lock(state().mutex);
    state().undos.push_back(undo);
    state().count.store(state().undos.size());
  } catch (...) {
    log_line(LogLevel::kWarning, {"a driver object could not be given back and not be remembered: it leaks"});
  }
}

bool keep_if_mapped(const ArenaRange& range) noexcept {
  if (count() == 0) return false;
  std::list<Addresses> kept;
  try {
    kept.emplace_back();
  } catch (...) {
    // No memory to remember them by.
  }
  const std::lock_guard lock(state().mutex);
  if (!is_mapped(range.address, range.size_bytes)) return false;
  if (kept.empty()) {
    log_line(LogLevel::kWarning, {"addresses could not be given back and not be remembered: they leak"});
  } else {
    kept.front() = Addresses(range);
    state().addresses.splice(state().addresses.end(), kept);
  }
  return true;
}

void retry(bool may_free_host_memory) noexcept {
  if (count() == 0) return;
  if (driver_if_loaded() == nullptr) return;
  std::list<Addresses> free;  // go outside the lock
  const std::lock_guard lock(state().mutex);
  std::vector<Undo>& undos = state().undos;
  // In place and in order: needs no memory.
  std::erase_if(undos, [&](Undo& undo) {
    if (is_host_memory(undo) && !may_free_host_memory) return false;
    return is_undone(perform(undo));
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
    return is_of_mapping(undo) || std::none_of(undos.begin(), undos.end(), [&](const Undo& other) {
             return is_of_mapping(other) && other.handle == undo.handle;
           });
  };
  uint64_t total = 0;
  for (const Undo& undo : undos) {
    if (undo.handle != 0 && undo.device == device && is_counted(undo)) total += undo.size_bytes;
  }
  return total;
}

}  // namespace deferred_undos
}  // namespace ebbtide
