#include "preload/placed_memory.h"

#include "base/text.h"
#include "core/allocate/allocator.h"
#include "core/state/core.h"
#include "preload/allocate.h"
#include "preload/caller.h"
#include "preload/memory_map.h"
#include "preload/settings.h"

namespace ebbtide::preload {
namespace {

// The tag of spills of memory that has no tag of its own. They are visible and counted, and a pause of all tags keeps
// their bytes.
constexpr const char* kSpillTag = "overflow";

Policy policy_of(const Request& request) {
  Policy policy;
  if (request.tagged_as) {
    policy.backup = request.tagged_as->backup;
    policy.retain = request.tagged_as->retain;
  }
  const OnShortage on_shortage = settings().on_shortage;
  if (on_shortage == OnShortage::kSplit) policy.overflow = Overflow::kSplit;
  if (on_shortage == OnShortage::kWhole) policy.overflow = Overflow::kWhole;
  policy.is_freed_singly = true;
  // torch frees its cached blocks when it is refused, and asks again. So nothing spills while gigabytes are idle.
  policy.flushes_first = policy.overflow != Overflow::kNone && will_flush();
  return policy;
}

// While the tag of a pauseable program is away, torch allocates from a pool that neither flushes nor asks again.
bool has_bypass_pool() {
  const ThreadPolicy& program = settings().program;
  Registry& registry = Core::instance().registry;
  return program.tagging == Tagging::kOn && registry.is_any_away(registry.tag(program.tag.data()));
}

}  // namespace

CUcontext own_context(int device) {
  CUcontext current = nullptr;
  if (driver().cuCtxGetCurrent(&current) != CUDA_SUCCESS) return nullptr;
  return current != primary_context(device) ? current : nullptr;
}

bool will_flush() { return !has_bypass_pool() && is_called_by(kTorchAllocator); }

AllocationResult place(const Request& request) {
  Core& core = Core::instance();
  Tag& tag = core.registry.tag(request.tagged_as ? request.tagged_as->tag.data() : kSpillTag);
  const AllocationResult placed =
      try_allocate(core, tag, policy_of(request), request.device, request.size_bytes, request.stream);
  if (placed.must_flush()) return placed;
  if (request.tagged_as && request.tagged_as->lease == 0) tag.is_hooked.store(true);
  if (const auto found = core.registry.find(placed.address)) found->other_contexts[0] = own_context(request.device);
  try {
    auto& sizes = records().asked_sizes;
    sizes.keep(placed.address, sizes.make_entry(request.size_bytes));
  } catch (const std::bad_alloc&) {
    // Then the program is told the rounded size.
  }
  return placed;
}

bool free_placed(CUdeviceptr address) {
  const auto placed = find_placed(address);
  if (!placed || placed->start != address) return false;
  if (const auto found = Core::instance().registry.find(address)) {
    const CUcontext own = own_context(placed->device);
    if (own != found->other_contexts[0]) found->other_contexts[1] = own;
  }
  records().asked_sizes.take(address);
  return deallocate_if_ours(Core::instance(), address);
}

std::optional<PlacedMemory> find_placed(CUdeviceptr address) {
  Core* const core = Core::instance_if_made();  // asking makes no core
  const auto found = core == nullptr ? nullptr : core->registry.find(address);
  if (found == nullptr) return std::nullopt;
  const CUdeviceptr start = found->address();
  return PlacedMemory{start, records().asked_sizes.find(start).value_or(found->size_bytes()), found->device};
}

std::string why_not_shared(CUdeviceptr address) {
  const auto found = Core::instance().registry.find(address);
  const std::string tag = found != nullptr ? found->tag->name : "";
  if (tag == kSpillTag)
    return "memory that has spilled can't be shared with another process: share what fits on the device, or run with "
           "EBBTIDE_OVERFLOW=none";
  const std::string advice = settings().tags_all ? ", or run without EBBTIDE_PAUSEABLE_ALL" : "";
  return "memory of the tag " + in_quotes(tag) +
         " can't be shared with another process: allocate what you share in a thread whose tagging is off" + advice;
}

}  // namespace ebbtide::preload
