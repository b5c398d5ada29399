#include "core/move/separation.h"

#include <algorithm>
#include <exception>
#include <set>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/scope_exit.h"
#include "core/state/shortage.h"
#include "driver/context.h"
#include "driver/stream.h"

namespace ebbtide {

TagClaim Separation::claim() const {
  return {.tags = request_.tags,
          .concerns = [](const Allocation& allocation) { return allocation.device_bytes() > 0; },
          .is_among_all = true,
          .leases = TagClaim::Leases::kRefused};
}

void Separation::prepare(const Allocations& allocations) {
  if (driver().cuMemcpyDtoDAsync == nullptr) return;  // then all go on sharing
  const std::set<CUdeviceptr> named(request_.tags.addresses.begin(), request_.tags.addresses.end());
  std::map<const Backing*, Sharers> by_backing;
  std::map<const Backing*, size_t> named_count;
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    for (Chunk& chunk : allocation->chunks) {
      if (!chunk.is_on_device() || !chunk.is_resident()) continue;
      by_backing[chunk.backing.get()].push_back({allocation, &chunk});
      named_count[chunk.backing.get()] += named.contains(allocation->address()) ? 1 : 0;
    }
  }
  for (auto& [backing, sharers] : by_backing) {
    const size_t count = named_count[backing];
    const auto sharer_count = static_cast<size_t>(sharers.front().chunk->backing.use_count());
    if (count > 0 && count < sharer_count) shared_[sharers.front().allocation->device].push_back(std::move(sharers));
  }
  // The smallest first: once one finds no room, neither does the rest.
  for (auto& [device, all] : shared_)
    std::sort(all.begin(), all.end(), [](const Sharers& a, const Sharers& b) { return order_of(a) < order_of(b); });
}

std::pair<uint64_t, CUdeviceptr> Separation::order_of(const Sharers& sharers) {
  uint64_t size_bytes = 0;
  for (const Sharer& sharer : sharers) size_bytes += sharer.chunk->size_bytes;
  return {size_bytes, sharers.front().address()};
}

std::vector<int> Separation::devices() const {
  std::vector<int> devices;
  for (const auto& [device, all] : shared_) devices.push_back(device);
  return devices;
}

void Separation::run_device(int device) {
  for (const Sharers& sharers : shared_.at(device)) {
    std::shared_ptr<Allocation> spare;
    bool is_idle = true;
    // Where a copy failed, others may be on their way into it: as any other memory, it waits for the device.
    const ScopeExit end([&]() noexcept {
      if (spare != nullptr && !is_idle) core().deferred_frees.destroy(std::move(spare));
    });
    try {
      spare = make_spare(device, sharers);
    } catch (const Error& error) {
      if (!is_device_shortage(error)) throw;
      return;
    }
    is_idle = false;
    copy(device, sharers, *spare);
    is_idle = true;
    remap(device, sharers, *spare);
  }
}

// A chunk for each of them, behind addresses of its own.
std::shared_ptr<Allocation> Separation::make_spare(int device, const Sharers& sharers) {
  auto spare = std::make_shared<Allocation>();
  spare->device = device;
  uint64_t size_bytes = 0;
  for (const Sharer& sharer : sharers) {
    Chunk& chunk = spare->chunks.emplace_back(spare->chunks.size(), size_bytes, sharer.chunk->size_bytes);
    chunk.place.store(Place::kDropped);
    chunk.backing->charge = core().budgets.device.charge(device, sharer.chunk->size_bytes);
    chunk.backing->memory = PhysicalMemory::create_on_device(sharer.chunk->size_bytes, device);
    size_bytes += sharer.chunk->size_bytes;
  }
  spare->addresses = std::make_shared<const Addresses>(core().spare_addresses.take(size_bytes));
  for (Chunk& chunk : spare->chunks)
    chunk.backing->mapping = Mapping::map(spare->address() + chunk.offset, chunk.backing->memory, device);
  return spare;
}

void Separation::copy(int device, const Sharers& sharers, Allocation& spare) {
  const ContextScope scope(device);
  const Stream stream = Stream::create();
  for (size_t index = 0; index < sharers.size(); ++index) {
    check(driver().cuMemcpyDtoDAsync(spare.address() + spare.chunks[index].offset, sharers[index].address(),
                                     sharers[index].chunk->size_bytes, stream.get()),
          "cuMemcpyDtoDAsync", "size=" + std::to_string(sharers[index].chunk->size_bytes));
  }
  stream.synchronize();
}

// The bytes are in both memories until the shared one is unmapped; from then on each is whole in its own, mapped or
// not.
void Separation::remap(int device, const Sharers& sharers, Allocation& spare) {
  for (Chunk& chunk : spare.chunks) chunk.backing->mapping.unmap();
  sharers.front().chunk->backing->mapping.unmap();
  note_released();
  const DeviceSet peers = core().peers.of(device);
  std::exception_ptr first_error;
  for (size_t index = 0; index < sharers.size(); ++index) {
    Chunk& chunk = *sharers[index].chunk;
    std::swap(chunk.backing, spare.chunks[index].backing);  // the shared memory goes with the last of the spare's
    row(*sharers[index].allocation).copied += chunk.size_bytes;
    try {
      chunk.backing->mapping = core().peers.map(sharers[index].address(), chunk.backing->memory, device, peers);
    } catch (...) {
      chunk.is_detached.store(true, std::memory_order_release);
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

void Separation::settle() noexcept { shared_.clear(); }

}  // namespace ebbtide
