#include "core/memory/host_pool.h"

#include <algorithm>

#include "base/error.h"
#include "core/memory/allocation.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "policy/placement.h"

namespace ebbtide {
namespace {

HostLocation require_location(int device) {
  if (const auto location = host_location(device)) return *location;
  throw StoreError("device " + std::to_string(device) + " reaches no host memory that the driver would make (" +
                       probe_host_location(device).found + "): overflow can't work here, see `ebbtide doctor`",
                   {0, 0, 0});
}

// As much of the pool is made for segments of torch that are smaller than a chunk.
constexpr uint64_t kSmallShare = 8;

// 64 MiB of such pieces: for three segments of 20 MiB, and two of 2 MiB.
std::vector<uint64_t> cut_small(uint64_t granularity_bytes) {
  std::vector<uint64_t> handles;
  for (const uint64_t segment_bytes : {20 * kMiB, 20 * kMiB, 20 * kMiB, 2 * kMiB, 2 * kMiB}) {
    const auto cut = policy::cut_for_host(round_up(segment_bytes, granularity_bytes), granularity_bytes);
    handles.insert(handles.end(), cut.begin(), cut.end());
  }
  return handles;
}

// False where it could not be cleared and nothing is under way. Throws DriverError where something may be.
bool clear(CUdeviceptr address, size_t size_bytes) {
  CUresult result = CUDA_SUCCESS;
  try {
    const Stream stream = Stream::create();
    result = driver().cuMemsetD8Async(address, 0, size_bytes, stream.get());
    if (result != CUDA_SUCCESS) return false;
    result = driver().cuStreamSynchronize(stream.get());
  } catch (const DriverError&) {
    return false;
  }
  if (result == CUDA_SUCCESS) return true;
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  return false;
}

}  // namespace

HostPool::HostPool(HostBudget& budget)
    : budget_(budget),
      kept_holder_(budget.holder("host pool")),
      spilled_holder_(budget.holder(kSpilledMemory)),
      twins_(budget) {
  budget_.set_idle(this);
}

HostPool::Handle HostPool::make(const HostLocation& location, HostCharge charge, uint64_t size_bytes,
                                const std::string& purpose) {
  Handle handle;
  handle.charge = std::move(charge);
  handle.charge.hold_for(spilled_holder_);
  try {
    handle.memory = PhysicalMemory::create_on_host(size_bytes, location);
  } catch (const DriverError& error) {
    if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
    if (kept_bytes() > 0) {  // kept memory of other sizes may make room
      trim();
      return make(location, std::move(handle.charge), size_bytes, purpose);
    }
    throw StoreError(purpose + ": the system makes no " + format_bytes(size_bytes) +
                         " of host memory for the device (" + error.what() + ")",
                     {size_bytes, budget_.available_bytes(), budget_.limit_bytes()});
  }
  return handle;
}

HostPool::Handle HostPool::take_kept(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(key);
  if (found == kept_.end() || found->second.empty()) return {};
  Handle handle = std::move(found->second.back());
  found->second.pop_back();
  kept_bytes_.fetch_sub(key.second);
  handle.charge.hold_for(spilled_holder_);
  return handle;
}

std::vector<HostPool::Handle> HostPool::take(int device, const std::vector<uint64_t>& sizes,
                                             const std::string& purpose) {
  std::vector<Handle> handles;
  if (sizes.empty()) return handles;
  const HostLocation location = require_location(device);
  handles.reserve(sizes.size());
  uint64_t missing_bytes = 0;
  for (const uint64_t size_bytes : sizes) {
    Handle& handle = handles.emplace_back(take_kept({location, size_bytes}));
    missing_bytes += handle.memory.has_handle() ? 0 : size_bytes;
  }
  try {
    // Before the first handle is made, so that an error names the need of the whole. Kept memory of other sizes may
    // take up the missing room.
    budget_.require_room(missing_bytes, purpose);
    for (size_t index = 0; index < sizes.size(); ++index) {
      if (!handles[index].memory.has_handle())
        handles[index] = make(location, budget_.charge_outside_cgroups(sizes[index], purpose), sizes[index], purpose);
    }
  } catch (...) {
    put_back(device, std::move(handles));
    throw;
  }
  return handles;
}

bool HostPool::give_way(uint64_t bytes) noexcept {
  const uint64_t kept = kept_bytes();
  shrink_to(saturating_subtract(kept, bytes));
  return kept > 0 || twins_.give_way(bytes) > 0;
}

bool HostPool::keep(const Key& key, Handle handle) noexcept {
  const std::lock_guard lock(mutex_);
  if (!has_room(key.second)) return false;
  try {
    std::vector<Handle>& kept = kept_[key];
    kept.push_back(std::move(handle));
    kept.back().charge.hold_for(kept_holder_);
    kept_bytes_.fetch_add(key.second);
    return true;
  } catch (...) {
    return false;
  }
}

void HostPool::put_back(int device, std::vector<Handle> handles) noexcept {
  if (handles.empty()) return;
  try {
    const auto location = host_location(device);
    for (Handle& handle : handles) {
      const uint64_t size_bytes = handle.memory.size_bytes();
      if (location && size_bytes > 0) keep({*location, size_bytes}, std::move(handle));
    }
  } catch (...) {
    // They go to the system.
  }
}

void HostPool::recycle(int device, CUdeviceptr address, Chunk& chunk) {
  const auto location = host_location(device);
  if (location && chunk.backing->mapping.is_mapped()) make_room_for({*location, chunk.size_bytes});
  const bool is_kept =
      location && chunk.backing->mapping.is_mapped() && has_room(chunk.size_bytes) && clear(address, chunk.size_bytes);
  chunk.backing->mapping.unmap();
  if (is_kept) {
    keep({*location, chunk.size_bytes}, {std::move(chunk.backing->host_charge), std::move(chunk.backing->memory)});
  } else {
    chunk.backing->release();
  }
}

size_t HostPool::kept_count() {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [key, handles] : kept_) count += handles.size();
  return count;
}

void HostPool::fill(int device) {
  if (!has_room(policy::kHostChunkBytes)) return;
  const HostLocation location = require_location(device);
  const auto add = [&](uint64_t size_bytes) {
    if (!has_room(size_bytes)) return false;
    HostCharge charge = budget_.charge_idle(size_bytes, "the host pool");
    return keep({location, size_bytes}, make(location, std::move(charge), size_bytes, "the host pool"));
  };
  const uint64_t capacity = capacity_bytes();
  const uint64_t small_bytes = capacity / kSmallShare / policy::kHostChunkBytes * policy::kHostChunkBytes;
  while (kept_bytes() + policy::kHostChunkBytes + small_bytes <= capacity && add(policy::kHostChunkBytes)) {
  }
  const std::vector<uint64_t> small = cut_small(granularity(device));
  while (small_bytes > 0 && has_room(policy::kHostChunkBytes)) {
    for (const uint64_t size_bytes : small) {
      if (!add(size_bytes)) return;
    }
  }
}

void HostPool::set_capacity(uint64_t bytes) {
  const uint64_t ram_bytes = budget_.ram_bytes();
  if (bytes > ram_bytes)
    throw InvalidArgument("host_pool is " + format_bytes(bytes) + ", and this machine has " + format_bytes(ram_bytes) +
                          " of RAM: ask for less");
  capacity_bytes_.store(bytes);
  shrink_to(bytes);
}

void HostPool::make_room_for(const Key& key) {
  const uint64_t capacity = capacity_bytes();
  if (key.second <= capacity && !is_for_spills(key)) shrink_to(capacity - key.second, true);
}

void HostPool::shrink_to(uint64_t bytes, bool spills_only) noexcept {
  for (bool is_done = false; !is_done;) {
    Handle gone;  // goes without the lock: giving memory back takes long
    const std::lock_guard lock(mutex_);
    is_done = true;
    for (auto& [key, handles] : kept_) {
      if (handles.empty() || kept_bytes_.load() <= bytes) continue;
      if (spills_only && !is_for_spills(key)) continue;
      gone = std::move(handles.back());
      handles.pop_back();
      kept_bytes_.fetch_sub(key.second);
      is_done = false;
      break;
    }
  }
}

}  // namespace ebbtide
