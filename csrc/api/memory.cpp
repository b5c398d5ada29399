#include <string>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "base/log.h"
#include "core/allocate/allocator.h"
#include "core/state/shortage.h"

// Allocations, slots, leases and captures.
using namespace ebbtide;
using api::as_address;
using api::guarded;
using api::require;
using api::require_given;
using api::with_core;

static_assert(SlotTable::kCapacity == EBBTIDE_SLOT_COUNT);

namespace {

// Runs before the first spill. Without the pool a spill only takes longer.
void fill_host_pool(Core& core, int device) {
  try {
    core.host_pool.fill(device);
  } catch (const Error& error) {
    log_line(LogLevel::kWarning, {"the host pool is not full: ", error.what()});
  }
}

// No, where there is no answer: in a forked child.
template <typename Question>
bool answer(const Question& question) noexcept {
  bool is_so = false;
  with_core(nullptr, [&](Core& core) { is_so = question(core.registry); });
  return is_so;
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_alloc(const char* tag, const ebbtide_policy* policy, int32_t device, uint64_t size_bytes,
                             void** address, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(tag, "tag");
    require_given(address, "address");
    *address =
        reinterpret_cast<void*>(allocate(core, core.registry.tag(tag), api::read_policy(policy), device, size_bytes));
  });
}

ebbtide_status ebbtide_free(void* address, ebbtide_error* error) {
  return guarded(error, [&] {
    if (address != nullptr) deallocate(Core::instance(), as_address(address));
  });
}

ebbtide_status ebbtide_fill_host_pool(int32_t device, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    if (core.host_pool.capacity_bytes() > 0) api::require_overflow();
    core.host_pool.fill(device);
  });
}

ebbtide_status ebbtide_find(const void* address, bool* found, ebbtide_allocation_info* info, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(found, "found");
    const auto allocation = core.registry.find(as_address(address));
    if (allocation != nullptr && info != nullptr) *info = api::describe(*allocation);
    *found = allocation != nullptr;
  });
}

bool ebbtide_is_away(const void* address, uint64_t size_bytes) {
  return answer([&](const Registry& registry) { return registry.is_away(as_address(address), size_bytes); });
}

bool ebbtide_is_missing(const void* address, uint64_t size_bytes) {
  return answer([&](const Registry& registry) { return registry.is_missing(as_address(address), size_bytes); });
}

bool ebbtide_find_in_handler(const void* address, char* tag, size_t capacity, bool* is_away) {
  return tag != nullptr && is_away != nullptr &&
         Core::instance().registry.find_in_handler(as_address(address), tag, capacity, is_away);
}

ebbtide_status ebbtide_bind_slot(const char* tag, const ebbtide_policy* policy, int32_t device, int32_t* slot,
                                 ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(tag, "tag");
    require_given(slot, "slot");
    require(device >= 0, "device is negative");
    const Policy read = api::read_policy(policy);
    if (read.backup != BackupKind::kNone) require_store(read.backup);
    *slot = core.slots.bind(tag, read, device);
    if (read.overflow != Overflow::kNone) fill_host_pool(core, device);
  });
}

void* ebbtide_slot_alloc(int32_t slot, uint64_t size_bytes, void* stream) {
  return ebbtide_slot_alloc_or_error(slot, size_bytes, stream, nullptr);
}

void* ebbtide_slot_alloc_or_error(int32_t slot, uint64_t size_bytes, void* stream, ebbtide_error* error) {
  ebbtide_error found = EBBTIDE_ERROR_INIT;
  void* address = nullptr;
  const ebbtide_status status = guarded(&found, [&] {
    const SlotBinding* binding = Core::instance().slots.find(slot);
    require(binding != nullptr, "this slot was never bound");
    address = reinterpret_cast<void*>(
        allocate(Core::instance(), *binding->tag, binding->policy, binding->device, size_bytes, stream));
  });
  // Out of memory is the caller's business (torch raises it); anything else would be lost without a line.
  if (status != EBBTIDE_OK && status != EBBTIDE_OUT_OF_MEMORY)
    log_line(LogLevel::kWarning, {"an allocation failed: ", found.message});
  if (status != EBBTIDE_OK && error != nullptr) *error = found;
  return address;
}

void ebbtide_slot_free(void* address) {
  if (is_forked_child()) return;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  if (ebbtide_free(address, &error) != EBBTIDE_OK) log_line(LogLevel::kWarning, {"a free failed: ", error.message});
}

ebbtide_status ebbtide_open_lease(const char* tag, const char* holder, ebbtide_lease* lease, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(tag, "tag");
    require_given(lease, "lease");
    const LeaseInfo info = open_lease(core, tag, holder != nullptr ? holder : "an unnamed holder");
    *lease = {info.id, info.epoch, info.is_away};
  });
}

ebbtide_status ebbtide_close_lease(uint64_t id, ebbtide_error* error) {
  return guarded(error, [&] {
    if (!is_forked_child()) Core::instance().registry.leases.close(id);
  });
}

uint64_t ebbtide_last_lease(void) { return is_forked_child() ? 0 : Core::instance().registry.leases.newest(); }

ebbtide_status ebbtide_begin_capture(ebbtide_error* error) {
  return with_core(error, [](Core& core) { core.capture_gate.begin_capture(); });
}

ebbtide_status ebbtide_end_capture(ebbtide_error* error) {
  return with_core(error, [](Core& core) {
    core.capture_gate.end_capture();
    give_back_caches(core);
  });
}

}  // extern "C"
