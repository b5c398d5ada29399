#include "vmm/held_addresses.h"

#include <sys/mman.h>

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"

namespace ebbtide::held_addresses {
namespace {

// Below where Linux puts programs and libraries, above what sanitizers use, and within what GPUs address.
constexpr CUdeviceptr kFirst = CUdeviceptr{32} << 40;
constexpr CUdeviceptr kEnd = CUdeviceptr{80} << 40;
constexpr size_t kAlignment = kGiB;

struct State {
  std::mutex mutex;
  CUdeviceptr next = kFirst;
  std::atomic<size_t> count{0};
  std::map<CUdeviceptr, size_t> lost;  // parts of held ranges that the driver keeps or others have: address -> size
};
State& state() {
  static State* const instance = new State;
  return *instance;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// Only if nothing else is there.
bool try_hold(CUdeviceptr address, size_t size_bytes) noexcept {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* const found = ::mmap(pointer(address), size_bytes, PROT_NONE, kFlags, -1, 0);
  if (found == pointer(address)) return true;
  if (found != MAP_FAILED) ::munmap(found, size_bytes);  // a kernel that does not know the flag
  return false;
}

// The first lost part that ends behind the address.
auto lost_from(CUdeviceptr address) {
  auto part = state().lost.upper_bound(address);
  if (part != state().lost.begin() && std::prev(part)->first + std::prev(part)->second > address) --part;
  return part;
}

bool is_lost(CUdeviceptr address, size_t size_bytes) {
  const auto part = lost_from(address);
  return part != state().lost.end() && part->first < address + size_bytes;
}

void note_lost(CUdeviceptr address, size_t size_bytes) noexcept try {
  const std::lock_guard lock(state().mutex);
  state().lost[address] = size_bytes;
} catch (const std::bad_alloc&) {
  log_line(LogLevel::kError, {"addresses of paused memory are lost, and it can't be remembered which"});
}

// What can't be held again is another's.
void hold_again(CUdeviceptr address, size_t size_bytes) noexcept {
  if (try_hold(address, size_bytes)) return;
  log_line(LogLevel::kWarning, {"another part of the program has taken addresses of paused memory, which can't come "
                                "back there: it maps memory at addresses of its own choice"});
  note_lost(address, size_bytes);
}

[[noreturn]] void refuse() {
  throw StateError(
      "memory can't come back to its addresses: the driver does not free them, another part of the program has taken "
      "them meanwhile, or the driver gives others than it is asked for. Nothing is lost: its bytes stay where they are");
}

}  // namespace

bool are_used() noexcept { return speaks_hip(); }

CUdeviceptr hold(size_t size_bytes) {
  const std::lock_guard lock(state().mutex);
  const size_t step = round_up(size_bytes, kAlignment);
  // Twice through all of it: what was given back may lie before.
  for (int round = 0; round < 2; ++round) {
    for (; state().next + step <= kEnd; state().next += step) {
      if (is_lost(state().next, size_bytes) || !try_hold(state().next, size_bytes)) continue;
      state().next += step;
      ++state().count;
      return state().next - step;
    }
    state().next = kFirst;
  }
  throw StateError("the process has no addresses left for " + format_bytes(size_bytes) + ": raise `ulimit -v`");
}

size_t count() noexcept { return state().count; }

void let_go(CUdeviceptr address, size_t size_bytes) noexcept {
  const std::lock_guard lock(state().mutex);
  --state().count;
  const CUdeviceptr end = address + size_bytes;
  for (auto part = lost_from(address); part != state().lost.end() && part->first < end;) {
    if (part->first > address) ::munmap(pointer(address), part->first - address);
    address = part->first + part->second;
    part = state().lost.erase(part);
  }
  if (address < end) ::munmap(pointer(address), end - address);
}

void lend(CUdeviceptr address, size_t size_bytes) {
  {
    const std::lock_guard lock(state().mutex);
    if (is_lost(address, size_bytes)) refuse();
  }
  ::munmap(pointer(address), size_bytes);
  CUdeviceptr given = 0;
  const CUresult result = driver().cuMemAddressReserve(&given, size_bytes, 0, address, 0);
  if (result == CUDA_SUCCESS && given == address) return;
  if (result == CUDA_SUCCESS) driver().cuMemAddressFree(given, size_bytes);
  hold_again(address, size_bytes);
  check(result, "cuMemAddressReserve", "size=" + std::to_string(size_bytes));
  refuse();
}

CUresult take_back(CUdeviceptr address, size_t size_bytes) noexcept {
  const CUresult result = driver_if_loaded()->cuMemAddressFree(address, size_bytes);
  if (!is_undone(result)) {
    note_lost(address, size_bytes);
    return result;
  }
  {
    const std::lock_guard lock(state().mutex);
    state().lost.erase(address);
  }
  hold_again(address, size_bytes);
  return result;
}

}  // namespace ebbtide::held_addresses
