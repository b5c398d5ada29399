#include "core/operation/swap.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/error.h"
#include "core/state/shortage.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

uint64_t sum_of(const std::vector<HandleKind>& handles) {
  return std::accumulate(handles.begin(), handles.end(), uint64_t{0},
                         [](uint64_t sum, const HandleKind& each) { return sum + each.size_bytes; });
}

void note_swapped(const Allocations& allocations) {
  for (const auto& allocation : allocations) allocation->tag->was_swapped = true;
}

}  // namespace

void require_apart(const OperationRequest& request) {
  for (const std::string& name : request.tags.names) {
    const auto& others = request.resume_tags.names;
    if (std::find(others.begin(), others.end(), name) != others.end())
      throw InvalidArgument("'" + name + "' can't leave and come back in one swap");
  }
  if (request.tags.names.empty() || request.resume_tags.names.empty())
    throw InvalidArgument("a swap names the tags that leave and those that come back");
}

void SwapOut::prepare(const Allocations& allocations) {
  note_swapped(allocations);
  Pause::prepare(allocations);
}

void SwapOut::open(int device, const std::vector<HandleKind>& returning) {
  const uint64_t leaving_bytes = Pause::leaving_bytes(device);
  const uint64_t returning_bytes = sum_of(returning);
  uint64_t largest = 0;
  for (const HandleKind& each : returning) largest = std::max(largest, each.size_bytes);
  const uint64_t difference = saturating_subtract(returning_bytes, leaving_bytes);
  const uint64_t margin = std::min(std::max(SwappedMemory::kMarginBytes, largest), returning_bytes);
  // The margin is welcome, the difference is needed.
  DeviceBudget& budget = core().budgets.device;
  DeviceCharge charge;
  uint64_t ahead_bytes = difference + margin;
  try {
    charge = budget.charge(device, ahead_bytes);
  } catch (const OutOfMemory&) {
    ahead_bytes = difference;
    charge = budget.charge(device, ahead_bytes);
  }
  auto memory = std::make_unique<SwappedMemory>(device, leaving_bytes, leaving_bytes + ahead_bytes);
  for (const HandleKind& each : returning) memory->announce(each);
  const ContextScope scope(device);
  try {
    memory->create_ahead(returning, difference, std::move(charge));
  } catch (const DriverError& error) {
    rethrow_shortage(error, budget, device, difference, "swap");
  }
  memory_[device] = std::move(memory);
}

void SwapOut::end_device(int device) noexcept { memory(device).close(); }

void SwapOut::release(int device, Backing& backing) {
  if (backing.has_memory()) {
    backing.mapping.unmap();
    memory(device).offer(backing.memory, backing.charge);
  }
  Pause::release(device, backing);
}

// The leaving side is prepared by now.
void SwapIn::prepare(const Allocations& allocations) {
  note_swapped(allocations);
  Resume::prepare(allocations);
  handles_ = returning_handles();
  std::set<int> devices = leaving_.devices();
  devices.insert(Resume::devices().begin(), Resume::devices().end());
  for (const int device : devices) leaving_.open(device, handles_[device]);
}

std::optional<Resume::TakenMemory> SwapIn::take_memory(int device, const HandleKind& kind) {
  try {
    SwappedMemory::Handle handle = leaving_.memory(device).take(kind);
    return TakenMemory{std::move(handle.charge), std::move(handle.memory), handle.is_fresh};
  } catch (const DriverError& error) {
    rethrow_shortage(error, core().budgets.device, device, sum_of(handles_.at(device)), "swap");
  }
}

void SwapIn::settle() noexcept {
  Resume::settle();
  leaving_.close();
}

}  // namespace ebbtide
