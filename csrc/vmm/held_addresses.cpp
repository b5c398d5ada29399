#include "vmm/held_addresses.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"

namespace ebbtide::held_addresses {
namespace {

// Below where Linux puts programs and libraries, above what AddressSanitizer uses, and within what GPUs address.
constexpr CUdeviceptr kFirst = CUdeviceptr{32} << 40;
constexpr CUdeviceptr kEnd = CUdeviceptr{80} << 40;
constexpr size_t kAlignment = kGiB;

using Parts = std::map<CUdeviceptr, size_t>;  // address -> size

struct State {
  std::mutex mutex;
  CUdeviceptr next = kFirst;
  std::atomic<size_t> count{0};
  Parts away;  // of held ranges: what is lent, and what others have taken
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

// The first part that is away and ends behind the address. These have the lock.
Parts::iterator away_from(CUdeviceptr address) {
  auto part = state().away.upper_bound(address);
  if (part != state().away.begin() && std::prev(part)->first + std::prev(part)->second > address) --part;
  return part;
}

bool is_away(CUdeviceptr address, size_t size_bytes) {
  const auto part = away_from(address);
  return part != state().away.end() && part->first < address + size_bytes;
}

// What can't be held again stays away.
void hold_again(Parts::iterator part) noexcept {
  if (try_hold(part->first, part->second)) {
    state().away.erase(part);
    return;
  }
  const char* const why = errno == EEXIST ? "another part of the program has taken them" : "the system maps no more";
  log_line(LogLevel::kWarning, {"paused memory can't come back to its addresses: ", why});
}

[[noreturn]] void refuse() {
  throw StateError(
      "memory can't come back to its addresses: the driver does not free them or gives others, or another part of the "
      "program has taken them. Nothing is lost: its bytes stay where they are. Try again; if that does not help, end "
      "what maps memory at addresses of its own choice");
}

}  // namespace

bool are_used() noexcept { return speaks_hip(); }

CUdeviceptr hold(size_t size_bytes) {
  const std::lock_guard lock(state().mutex);
  const size_t step = round_up(size_bytes, kAlignment);
  // Twice through all of it: what was given back may lie before.
  for (int round = 0; round < 2; ++round) {
    for (; state().next + step <= kEnd; state().next += step) {
      if (is_away(state().next, size_bytes) || !try_hold(state().next, size_bytes)) continue;
      state().next += step;
      ++state().count;
      return state().next - step;
    }
    state().next = kFirst;
  }
  check(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAddressReserve", "size=" + std::to_string(size_bytes));
  return 0;
}

size_t count() noexcept { return state().count; }

// What is still lent goes with the driver's range, and is not held again.
void let_go(CUdeviceptr address, size_t size_bytes) noexcept {
  const std::lock_guard lock(state().mutex);
  --state().count;
  const CUdeviceptr end = address + size_bytes;
  for (auto part = away_from(address); part != state().away.end() && part->first < end;) {
    if (part->first > address) ::munmap(pointer(address), part->first - address);
    address = part->first + part->second;
    part = state().away.erase(part);
  }
  if (address < end) ::munmap(pointer(address), end - address);
}

void lend(CUdeviceptr address, size_t size_bytes) {
  const std::lock_guard lock(state().mutex);
  if (is_away(address, size_bytes)) refuse();
  const auto part = state().away.emplace(address, size_bytes).first;
  if (::munmap(pointer(address), size_bytes) != 0) {
    state().away.erase(part);
    refuse();
  }
  CUdeviceptr given = 0;
  const CUresult result = driver().cuMemAddressReserve(&given, size_bytes, 0, address, 0);
  if (result == CUDA_SUCCESS && given == address) return;
  if (result == CUDA_SUCCESS) driver().cuMemAddressFree(given, size_bytes);
  hold_again(part);
  check(result, "cuMemAddressReserve", "size=" + std::to_string(size_bytes));
  refuse();
}

CUresult take_back(CUdeviceptr address, size_t size_bytes) noexcept {
  const CUresult result = driver_if_loaded()->cuMemAddressFree(address, size_bytes);
  if (result != CUDA_SUCCESS) return result;  // without a driver its range stays: nothing may be held there
  const std::lock_guard lock(state().mutex);
  if (const auto part = state().away.find(address); part != state().away.end()) hold_again(part);
  return result;
}

}  // namespace ebbtide::held_addresses
