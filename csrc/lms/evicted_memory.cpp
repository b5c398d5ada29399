#include "lms/evicted_memory.h"

#include <unistd.h>

#include <bitset>
#include <iterator>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "core/state/core.h"
#include "core/transfer/engine_pool.h"
#include "driver/context.h"

namespace ebbtide::lms {
namespace {

constexpr const char* kPurpose = "evicted memory";

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

uint64_t number_of(const void* address) { return reinterpret_cast<uint64_t>(address); }

// Populated memory that is charged.
std::unique_ptr<HostMemory> take_pages(uint64_t size_bytes, HostCharge& charge) {
  auto memory = HostMemory::map(size_bytes);
  memory->populate(populate_threads(size_bytes));
  charge.touch(size_bytes);
  return memory;
}

}  // namespace

EvictedMemory::Slab::~Slab() {
  if (!memory->is_abandoned()) return;
  charge.keep_for_good();
  pinned.keep_for_good();
}

EvictedMemory::OrdinaryPiece::~OrdinaryPiece() {
  if (!is_abandoned) return;
  memory->abandon();
  charge.keep_for_good();
}

std::byte* EvictedMemory::take(int device, size_t size_bytes) {
  if (size_bytes == 0) throw InvalidArgument("size_bytes is 0");
  primary_context(device);  // throws where there is no such device
  const uint64_t rounded = round_up(size_bytes, kAlignment);
  const bool is_small = rounded <= kSmallPieceBytes;
  if (std::byte* const piece = take_kept(is_small ? small_ : large_, rounded)) return piece;
  try {
    return take_fresh(device, rounded, is_small);
  } catch (const StoreError&) {
    // Before a refusal, everything that is held serves.
    if (std::byte* const piece = take_kept(is_small ? large_ : small_, rounded)) return piece;
    const auto permit = try_enter();
    if (!permit || !give_back_free_slabs()) throw;
  }
  return take_fresh(device, rounded, is_small);
}

std::byte* EvictedMemory::take_kept(policy::SlabSpace& space, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  return reinterpret_cast<std::byte*>(space.take(size_bytes).value_or(0));
}

// Throws StoreError if the host has too little room. That no more can be pinned is no reason to refuse.
std::byte* EvictedMemory::take_fresh(int device, uint64_t size_bytes, bool is_small) {
  const uint64_t exact_bytes = round_up(size_bytes, page_bytes());
  if (is_small) {
    try {
      if (std::byte* const piece = take_from_new_slab(device, kSharedSlabBytes, size_bytes, is_small)) return piece;
    } catch (const StoreError&) {
      // There may be room for less.
    }
  }
  if (std::byte* const piece = take_from_new_slab(device, exact_bytes, size_bytes, is_small)) return piece;
  return take_ordinary(exact_bytes);
}

// Null where it can't be pinned.
std::byte* EvictedMemory::take_from_new_slab(int device, uint64_t slab_bytes, uint64_t size_bytes, bool is_small) {
  std::unique_ptr<Slab> slab = make_slab(device, slab_bytes);
  if (slab == nullptr) return nullptr;
  const uint64_t address = number_of(slab->memory->bytes());
  policy::SlabSpace& space = is_small ? small_ : large_;
  Slabs::node_type undone;  // outlives the lock: it is unpinned without it
  const std::lock_guard lock(mutex_);
  const auto added = slabs_.emplace(address, std::move(slab)).first;
  try {
    space.add(address, slab_bytes);
  } catch (...) {
    undone = slabs_.extract(added);
    throw;
  }
  return reinterpret_cast<std::byte*>(space.take(size_bytes).value_or(0));
}

std::unique_ptr<EvictedMemory::Slab> EvictedMemory::make_slab(int device, uint64_t size_bytes) {
  if (is_pinning_refused_) return nullptr;
  const auto permit = gate_.try_enter();
  if (!permit || is_capture_visible(device, nullptr)) return nullptr;
  PinnedCharge pinned;
  try {
    pinned = pinned_budget_.charge(size_bytes, kPurpose);
  } catch (const StoreError&) {
    return nullptr;
  }
  HostCharge charge = budget_.charge(size_bytes, kPurpose);
  auto memory = take_pages(size_bytes, charge);
  try {
    const ContextScope scope(device);
    const RelaxedCaptureMode relaxed;  // captures that can't be seen stay whole as well
    const CUresult result = memory->try_pin();
    if (result == CUDA_SUCCESS)
      return std::make_unique<Slab>(device, std::move(charge), std::move(pinned), std::move(memory));
    log_line(LogLevel::kInfo, {"evicted memory is not pinned: cuMemHostRegister failed with ", result_name(result)});
  } catch (const DriverError& error) {
    log_line(LogLevel::kInfo, {"evicted memory is not pinned: ", error.what()});
  }
  is_pinning_refused_ = true;
  return nullptr;
}

std::byte* EvictedMemory::take_ordinary(uint64_t size_bytes) {
  HostCharge charge = budget_.charge(size_bytes, kPurpose);
  auto memory = take_pages(size_bytes, charge);
  std::byte* const bytes = memory->bytes();
  auto piece = std::make_unique<OrdinaryPiece>(std::move(charge), std::move(memory));
  const std::lock_guard lock(mutex_);
  ordinary_.emplace(number_of(bytes), std::move(piece));
  ordinary_bytes_ += size_bytes;
  return bytes;
}

void EvictedMemory::give_back(void* piece) {
  OrdinaryPieces::node_type gone;  // outlives the lock: its pages go back to the system without it
  const std::lock_guard lock(mutex_);
  if (small_.give_back(number_of(piece)) || large_.give_back(number_of(piece))) return;
  const auto found = ordinary_.find(number_of(piece));
  if (found == ordinary_.end() || found->second->is_given_back)
    throw InvalidArgument("no evicted memory begins at this address");
  if (found->second->is_abandoned) {
    found->second->is_given_back = true;
    return;
  }
  ordinary_bytes_ -= found->second->memory->size_bytes();
  gone = ordinary_.extract(found);
}

void EvictedMemory::abandon(const void* address) noexcept {
  const std::lock_guard lock(mutex_);
  const uint64_t number = number_of(address);
  if (small_.keep_for_good(number) || large_.keep_for_good(number)) {
    std::prev(slabs_.upper_bound(number))->second->memory->abandon();
    return;
  }
  const auto after = ordinary_.upper_bound(number);
  if (after == ordinary_.begin()) return;
  const auto& [begin, piece] = *std::prev(after);
  if (number - begin < piece->memory->size_bytes()) piece->is_abandoned = true;
}

void EvictedMemory::trim() {
  const auto permit = try_enter();
  if (!permit) {
    throw StateError(
        "a stream capture is under way, which unpinning host memory would break: give it back before or after the "
        "capture");
  }
  give_back_free_slabs();
  is_pinning_refused_ = false;
}

// Empty while a capture is under way. No capture begins while the permit lives.
std::optional<CaptureGate::Permit> EvictedMemory::try_enter() {
  auto permit = gate_.try_enter();
  std::bitset<kMaxDevices> devices;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [address, slab] : slabs_) devices.set(static_cast<size_t>(slab->device));
  }
  for (int device = 0; device < kMaxDevices; ++device) {
    if (devices.test(static_cast<size_t>(device)) && is_capture_visible(device, nullptr)) return std::nullopt;
  }
  return permit;
}

// False if there was none. Under a permit.
bool EvictedMemory::give_back_free_slabs() noexcept {
  const RelaxedCaptureMode relaxed;  // captures that can't be seen stay whole as well
  for (bool has_given = false;; has_given = true) {
    std::unique_ptr<Slab> slab;  // outlives the lock: it is unpinned without it
    const std::lock_guard lock(mutex_);
    const bool is_large = large_.find_free_slab().has_value();
    policy::SlabSpace& space = is_large ? large_ : small_;
    const auto found = space.find_free_slab();
    if (!found) return has_given;
    space.remove(*found);
    const auto owner = slabs_.find(*found);
    slab = std::move(owner->second);
    slabs_.erase(owner);
    is_pinning_refused_ = false;
  }
}

EvictedMemory::Usage EvictedMemory::usage() const {
  const std::lock_guard lock(mutex_);
  const uint64_t slab_bytes = small_.held_bytes() + large_.held_bytes();
  return {slab_bytes + ordinary_bytes_, small_.used_bytes() + large_.used_bytes() + ordinary_bytes_, slab_bytes};
}

EvictedMemory& evicted_memory() {
  static auto* const memory = [] {
    Core& core = Core::instance();
    return new EvictedMemory(core.budgets.host, core.budgets.pinned, core.capture_gate);
  }();
  return *memory;
}

}  // namespace ebbtide::lms
