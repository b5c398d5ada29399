#include "share/incoming.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "core/operation/operation.h"
#include "core/state/shortage.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

// With another process that gives nothing, and has not ended: it is stopped.
constexpr std::chrono::seconds kPatience{30};

}  // namespace

Reception::Reception(Core& core, const std::vector<Leaving>& leaving, bool must_clear)
    : core_(core), clears_(must_clear || core.rules.clears_handed.load()) {
  for (const Leaving& each : leaving) ++leaving_[each.device][each.kind];
}

std::vector<HandleKind> Reception::open(int device, std::vector<HandleKind> returning) {
  const auto& leaving = leaving_[device];
  uint64_t leaving_bytes = 0, returning_bytes = 0, largest = 0;
  for (const auto& [kind, count] : leaving) leaving_bytes += kind.size_bytes * count;
  for (const HandleKind& each : returning) {
    returning_bytes += each.size_bytes;
    largest = std::max(largest, each.size_bytes);
  }
  const uint64_t difference = saturating_subtract(returning_bytes, leaving_bytes);
  const uint64_t margin = std::min(std::max(SwappedMemory::kMarginBytes, largest), returning_bytes - difference);
  // All of it is this process's in the end.
  DeviceBudget& budget = core_.budgets.device;
  DeviceCharge charge = budget.charge(device, returning_bytes);
  const uint64_t ahead_bytes = difference + margin;
  auto on_device = std::make_shared<OnDevice>(device, leaving_bytes, leaving_bytes + ahead_bytes);
  SwappedMemory& memory = on_device->memory;
  for (const HandleKind& each : returning) memory.announce(each);
  // Rather those that the other process has none of.
  std::stable_partition(returning.begin(), returning.end(),
                        [&](const HandleKind& each) { return !each.is_exportable || !leaving.contains(each); });
  const ContextScope scope(device);
  try {
    memory.create_ahead(returning, difference, charge.split(ahead_bytes));
  } catch (const DriverError& error) {
    rethrow_shortage(error, budget, device, difference, "hand-over");
  }
  std::vector<HandleKind> promised;
  for (const auto& [kind, count] : leaving) {
    if (!kind.is_exportable) continue;
    const size_t shall_come = std::min(count, memory.wanted(kind));
    memory.promise(kind, shall_come);
    promised.insert(promised.end(), shall_come, kind);
  }
  on_device->charge = std::move(charge);
  const std::lock_guard lock(mutex_);
  if (has_ended_) memory.close();
  devices_[device] = std::move(on_device);
  return promised;
}

SwappedMemory::Handle Reception::take(int device, const HandleKind& kind) {
  std::unique_lock lock(mutex_);
  const auto on_device = devices_.at(device);
  lock.unlock();
  return on_device->memory.take(kind, kPatience);
}

void Reception::close() noexcept {
  std::map<int, std::shared_ptr<OnDevice>> given_up;
  const std::lock_guard lock(mutex_);
  given_up.swap(devices_);
}

// With the charge for so many bytes, or for what is left of it: the other side may give more than is wanted.
std::shared_ptr<Reception::OnDevice> Reception::find(int device, uint64_t size_bytes, DeviceCharge& charge) {
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(device);
  if (found == devices_.end()) return nullptr;
  DeviceCharge& left = found->second->charge;
  charge = left.split(std::min(size_bytes, left.size_bytes()));
  return found->second;
}

void Reception::receive(int device, uint64_t size_bytes, Descriptor file) {
  DeviceCharge charge;
  const auto on_device = find(device, size_bytes, charge);
  if (on_device == nullptr) return;
  PhysicalMemory memory;
  try {
    memory = PhysicalMemory::take_over(std::move(file), size_bytes, device);
  } catch (const Error&) {
    // It is free then, and made anew.
    return on_device->memory.note_released(size_bytes, std::move(charge));
  }
  on_device->memory.offer(memory, charge);
}

void Reception::note_released(int device, uint64_t size_bytes) {
  DeviceCharge charge;
  if (const auto on_device = find(device, size_bytes, charge))
    on_device->memory.note_released(size_bytes, std::move(charge));
}

void Reception::end() noexcept {
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  for (const auto& [device, on_device] : devices_) on_device->memory.close();
}

void Incoming::prepare(const Allocations& allocations) {
  Resume::prepare(allocations);
  std::map<int, std::vector<HandleKind>> wanted;
  for (const auto& [device, returning] : returning_handles()) wanted[device] = reception_.open(device, returning);
  for (const auto& [device, kinds] : wanted) {
    for (const HandleKind& each : kinds) want(device, each.size_bytes);
  }
  want(-1, 0);
}

void Incoming::want(int device, uint64_t size_bytes) {
  if (!want_(device, size_bytes)) throw StateError("the other process could not be told what is wanted of it");
}

std::optional<Resume::TakenMemory> Incoming::take_memory(int device, const HandleKind& kind) {
  try {
    SwappedMemory::Handle handle = reception_.take(device, kind);
    return TakenMemory{std::move(handle.charge), std::move(handle.memory), handle.is_fresh};
  } catch (const DriverError& error) {
    rethrow_shortage(error, core().budgets.device, device, kind.size_bytes, "hand-over");
  }
}

void Incoming::settle() noexcept {
  Resume::settle();
  reception_.close();
}

Report resume_from(Core& core, OperationRequest request, Reception& reception, Incoming::Visit want) {
  request.make_move = [&](Core& made_in, const OperationRequest& read) {
    return std::make_unique<Incoming>(made_in, read, reception, std::move(want));
  };
  return std::move(Operation::claim(core, OperationKind::kResume, std::move(request))->commit().front());
}

}  // namespace ebbtide
