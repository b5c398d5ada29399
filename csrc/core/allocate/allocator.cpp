#include "core/allocate/allocator.h"

#include <memory>
#include <string>

#include "base/error.h"
#include "core/allocate/build.h"
#include "core/allocate/flush_first.h"
#include "core/allocate/spill.h"
#include "core/state/shortage.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

// Nothing that large exists; catches negative sizes and keeps every sum far from overflow.
constexpr uint64_t kLargestAllocation = 1ULL << 46;

thread_local FlushFirst flush_first;

void check_request(const Policy& policy, uint64_t size_bytes) {
  if (policy.backup != BackupKind::kNone) require_store(policy.backup);
  if (size_bytes == 0) throw InvalidArgument("an allocation can't have 0 bytes");
  if (size_bytes > kLargestAllocation) {
    throw InvalidArgument(std::to_string(size_bytes) + " bytes are more than any device has: is the size negative?");
  }
}

void record_out_of_memory(Core& core, const AllocationRequest& request, const char* detail) noexcept {
  ++core.counters.alloc_failures;
  try {
    core.events.add({.kind = "out_of_memory", .tags = request.tag.name, .bytes = request.size_bytes, .detail = detail});
  } catch (...) {
    // No memory for the event's strings: the caller gets the error all the same.
  }
}

// The caller's choices besides: none where overflow is on, or large model support chooses the storages that leave.
OutOfMemory with_offer(const OutOfMemory& error, const Policy& policy) {
  if (policy.overflow != Overflow::kNone || error.cause == Cause::kLmsLimit || speaks_hip()) return error;
  return {std::string(error.what()) + ", or let what does not fit lie on the host (overflow: split)", error.device,
          error.shortage, error.cause};
}

// Builds and registers it.
AllocationResult try_once(Core& core, const AllocationRequest& request, bool may_spill) {
  SpillResult built;
  if (request.policy.overflow == Overflow::kNone) {
    std::vector<HostPool::Handle> none;
    built.allocation = build_allocation(core, request, none);
  } else {
    built = build_spilling(core, request, may_spill);
    if (built.allocation == nullptr) return {0, built.room_bytes};
  }
  built.allocation->sequence = core.registry.next_sequence();
  const CUdeviceptr address = built.allocation->address();
  core.registry.insert(std::move(built.allocation));
  return {address};
}

// Once more where memory was short and some could be given back. Out of memory is recorded, and says what else the
// caller may do.
AllocationResult try_and_record(Core& core, const AllocationRequest& request, bool may_spill, bool may_give_back) {
  LastResort last_resort(core, may_give_back);
  const auto attempt = [&] { return try_once(core, request, may_spill); };
  try {
    try {
      const AllocationResult result = retry_when_short(last_resort, request.device, request.size_bytes, attempt);
      return result.must_flush() && last_resort.give_back(false) ? attempt() : result;
    } catch (const DriverError& error) {
      rethrow_shortage(error, core.budgets.device, request.device, request.size_bytes,
                       "tag '" + request.tag.name + "'");
    }
  } catch (const OutOfMemory& error) {
    const OutOfMemory offered = with_offer(error, request.policy);
    record_out_of_memory(core, request, offered.what());
    throw offered;
  }
}

}  // namespace

AllocationResult try_allocate(Core& core, Tag& tag, const Policy& policy, int device, uint64_t size_bytes,
                              void* stream) {
  require_not_forked();
  ++core.counters.alloc_calls;
  check_request(policy, size_bytes);
  const ContextScope scope(device);
  const AllocationRequest request{tag, policy, device, round_up(size_bytes, granularity(device))};
  const uint64_t peer_generation = core.peers.refresh(false);
  const bool may_give_back = !is_capture_visible(device, stream);
  if (may_give_back) give_back_caches(core);
  const FlushFirst::Call call{&tag, device, request.size_bytes};
  // During a capture callers neither flush nor ask again.
  const bool may_flush = policy.flushes_first && may_give_back && !core.capture_gate.is_capturing();
  const bool may_spill = flush_first.is_second(call) || !may_flush;
  const AllocationResult result = try_and_record(core, request, may_spill, may_give_back);
  if (result.must_flush()) {
    flush_first.note_refused(call);
  } else {
    core.peers.catch_up(peer_generation);
  }
  return result;
}

CUdeviceptr allocate(Core& core, Tag& tag, const Policy& policy, int device, uint64_t size_bytes, void* stream) {
  const AllocationResult result = try_allocate(core, tag, policy, device, size_bytes, stream);
  if (!result.must_flush()) return result.address;
  throw OutOfMemory("device " + std::to_string(device) + " has too little memory for tag '" + tag.name +
                        "': give back cached memory, and ask again",
                    device,
                    {round_up(size_bytes, granularity(device)), result.room_bytes, core.budgets.device.limit_bytes()},
                    Cause::kDevice);
}

void deallocate(Core& core, CUdeviceptr address) {
  if (deallocate_if_ours(core, address)) return;
  throw InvalidArgument(
      "no allocation of ebbtide begins at this address: it was freed before, lies inside an allocation, or belongs "
      "to another allocator");
}

bool deallocate_if_ours(Core& core, CUdeviceptr address) {
  require_not_forked();
  ++core.counters.free_calls;
  bool is_ours = false;
  std::shared_ptr<Allocation> allocation = core.registry.take(address, &is_ours);
  if (allocation != nullptr) core.deferred_frees.destroy(std::move(allocation));
  return is_ours;
}

LeaseInfo open_lease(Core& core, const std::string& tag_name, const std::string& holder) {
  require_not_forked();
  core.peers.refresh(true);
  return core.registry.leases.open(core.registry.tag(tag_name), holder);
}

}  // namespace ebbtide
