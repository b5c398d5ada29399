#include "preload/allocate.h"

#include <array>
#include <atomic>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "base/log_throttle.h"
#include "base/settings.h"
#include "core/allocate/flush_first.h"
#include "core/allocate/room.h"
#include "core/state/shortage.h"
#include "driver/bus.h"
#include "policy/placement.h"
#include "preload/caller.h"
#include "preload/managed_memory.h"
#include "preload/memory_map.h"
#include "preload/placed_memory.h"
#include "preload/resolver.h"
#include "preload/settings.h"
#include "vmm/host_location.h"

namespace ebbtide::preload {
namespace {

// The size that the driver takes for an allocation is not documented: small ones share pages of 2 MiB.
constexpr uint64_t kSmallUnit = 512;
constexpr uint64_t kLargeUnit = 2 * kMiB;

uint64_t taken_bytes(uint64_t size_bytes) {
  return round_up(size_bytes, size_bytes < kLargeUnit ? kSmallUnit : kLargeUnit);
}

// Devices on which the driver had no room for a large request. From then on, large requests leave a last part to small
// ones, also under split; before that, none of them pays for the query.
constinit std::array<std::atomic<bool>, kMaxDevices> are_full{};

// EBBTIDE_HOST_POOL: made before the program needs it, once for each device that it allocates on.
void fill_host_pool(int device) {
  static constinit std::array<std::atomic<bool>, kMaxDevices> has_begun{};
  if (settings().on_shortage == OnShortage::kFail || settings().on_shortage == OnShortage::kManaged) return;
  HostPool& pool = Core::instance().host_pool;
  if (!is_countable(device) || pool.capacity_bytes() == 0 || has_begun[static_cast<size_t>(device)].exchange(true))
    return;
  try {
    pool.fill(device);
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning,
             {"the host pool (", source_of(Setting::kHostPool), ") is not all made: ", error.what()});
  }
}

// The reserve restricts spills only, so memory from the driver may reach into it. A request larger than the room of
// small ones is decided by the driver's answer: otherwise nearly all of it would go to the host to spare less than its
// own size.
bool takes_room_of_small(const Request& request) {
  try {
    const policy::DeviceRoom room = look_at_device(Core::instance(), request.device);
    const uint64_t spared_bytes = policy::room_for_small(kUnlimited, room.reserve_bytes);
    return request.size_bytes <= spared_bytes && request.size_bytes + spared_bytes > room.free_bytes;
  } catch (const Error&) {
    return false;  // the core can't use this device: the driver decides
  }
}

// The policy that the calling thread's allocation gets, by that of the thread, that of the program, and the caller.
std::optional<ThreadPolicy> choose_tag() {
  ThreadPolicy policy = thread_policy();
  if (policy.tagging == Tagging::kUnset) policy = settings().program;
  // Others share their memory with processes and devices (NCCL), which only the driver's own can do.
  const bool is_tagged = policy.tagging == Tagging::kOn && (settings().tags_all || is_called_by_torch());
  return is_tagged ? std::optional(policy) : std::nullopt;
}

// Whether torch makes the call, and large model support makes room for it where memory is short.
bool is_left_to_lms() {
  const Core* const core = Core::instance_if_made();
  return core != nullptr && core->rules.leaves_torch_to_lms.load() && is_called_by_torch();
}

bool must_place(const Request& request) {
  fill_host_pool(request.device);
  if (request.tagged_as) return true;
  if (request.is_left_to_lms || request.size_bytes < kLargeUnit) return false;
  Core& core = Core::instance();
  switch (settings().on_shortage) {
    case OnShortage::kManaged:
      return request.size_bytes > usable_device_bytes(core, request.device, request.size_bytes);
    case OnShortage::kWhole: {
      const uint64_t room_bytes = usable_device_bytes(core, request.device, request.size_bytes);
      return policy::place_whole(request.size_bytes, room_bytes).host_bytes > 0;
    }
    case OnShortage::kSplit:
      return !policy::is_small(request.size_bytes) && are_full[static_cast<size_t>(request.device)].load() &&
             takes_room_of_small(request);
    case OnShortage::kFail: break;
  }
  return false;
}

// The bytes of the device limit that a request that may overflow leaves to small ones.
uint64_t spared_for_small(const Request& request) {
  if (request.is_left_to_lms || settings().on_shortage == OnShortage::kFail || policy::is_small(request.size_bytes))
    return 0;
  const Core& core = Core::instance();
  const uint64_t limit_bytes = core.budgets.device.own_limit_bytes();
  return limit_bytes == kUnlimited ? 0 : core.rules.overflow.room_for_small(limit_bytes);
}

// As in the core, for memory that it places (Policy::flushes_first): torch is refused once, frees its cache, and asks
// again.
bool must_flush_first(const Request& request) {
  static thread_local constinit FlushFirst flush_first;
  const FlushFirst::Call call{nullptr, request.device, request.size_bytes};
  if (flush_first.is_second(call) || !will_flush()) return false;
  flush_first.note_refused(call);
  return true;
}

// Empty if the device limit does not allow it, or would have less than spared_bytes left.
CountedMemory::Entry charge(const Request& request, uint64_t spared_bytes = 0) {
  try {
    DeviceBudget& budget = Core::instance().budgets.device;
    return CountedMemory::make_entry(budget.charge_provisionally(request.device, taken_bytes(request.size_bytes),
                                                                 spared_bytes, DeviceHolder::kProgram));
  } catch (const OutOfMemory&) {
    return {};
  }
}

// Records what the driver has given for a charge.
void keep_counted(CountedMemory& memory, uint64_t key, CountedMemory::Entry entry, const Request& request) noexcept {
  if (&memory == &records().addresses) forget_managed(key);
  memory.keep(key, std::move(entry));
  Core::instance().budgets.device.note_peak(request.device);
}

// None if the device would have less than device_margin left. Held until the driver has answered.
std::optional<DeviceMargin::Hold> keep_margin(const Request& request) {
  try {
    return Core::instance().budgets.device_margin.require_room(request.device, taken_bytes(request.size_bytes));
  } catch (const OutOfMemory&) {
    return std::nullopt;
  } catch (const Error&) {
    return DeviceMargin::Hold();  // the core can't use this device: the driver decides
  }
}

// Out of memory, with a line on stderr.
CUresult refuse(const Request& request) {
  static constinit LogThrottle throttle;
  if (!throttle.allows()) return CUDA_ERROR_OUT_OF_MEMORY;
  const DeviceBudget& budget = Core::instance().budgets.device;
  const uint64_t margin_bytes = Core::instance().budgets.device_margin.bytes();
  const uint64_t limit_bytes = budget.own_limit_bytes();
  const std::string held = format_bytes(budget.held_bytes(request.device));
  const std::string limit = limit_bytes == kUnlimited
                                ? "no device_limit, " + held + " taken"
                                : "device_limit " + format_bytes(limit_bytes) + ", of which " + held + " are taken";
  const std::string message =
      std::string(request.call) + ": device " + std::to_string(request.device) +
      " has too little memory: " + format_amount(request.size_bytes) + " wanted, " +
      format_bytes(free_device_bytes(request.device)) + " free, " + limit +
      (margin_bytes == 0 ? "" : ", device_margin " + format_bytes(margin_bytes)) +
      (settings().on_shortage == OnShortage::kFail ? ". With EBBTIDE_OVERFLOW=split, what does not fit lies on the host"
                                                   : "");
  log_line(LogLevel::kError, {message});
  return CUDA_ERROR_OUT_OF_MEMORY;
}

// The program's own properties, except those that only device memory has.
CUmemAllocationProp on_host(CUmemAllocationProp properties, const HostLocation& location) {
  properties.location = location.where;
  properties.allocFlags.gpuDirectRDMACapable = 0;
  properties.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_NONE;
  return properties;
}

struct Overflowed {
  CUresult result = CUDA_SUCCESS;
  bool is_host_full = false;  // the host is full, though the device may have room in its reserve or for small requests
};

Overflowed overflow(const Request& request, CUdeviceptr* address) {
  if (request.is_left_to_lms) return {CUDA_ERROR_OUT_OF_MEMORY};
  const OnShortage on_shortage = settings().on_shortage;
  const bool may_spill = on_shortage == OnShortage::kSplit || on_shortage == OnShortage::kWhole;
  if (may_spill || request.tagged_as) {
    try {
      const AllocationResult placed = place(request);
      if (placed.must_flush()) return {CUDA_ERROR_OUT_OF_MEMORY};
      *address = placed.address;
      return {CUDA_SUCCESS};
    } catch (const OutOfMemory&) {
      // Of a spill the core has said why.
      if (may_spill) return {CUDA_ERROR_OUT_OF_MEMORY, !request.tagged_as};
    } catch (const DriverError&) {
      throw;
    } catch (const Error& error) {
      // An impossible size, or a driver that is too old for the core. The program asked for memory, and the only
      // failure it knows is out-of-memory.
      log_line(LogLevel::kError, {request.call, ": ", error.what()});
      return {CUDA_ERROR_OUT_OF_MEMORY};
    }
  }
  if (on_shortage != OnShortage::kManaged) return {refuse(request)};
  if (must_flush_first(request)) return {CUDA_ERROR_OUT_OF_MEMORY};
  return {allocate_managed(request.device, request.size_bytes, address)};
}

Overflowed create_on_host(const Request& request, const CUmemAllocationProp& properties,
                          CUmemGenericAllocationHandle* handle) {
  if (request.is_left_to_lms) return {CUDA_ERROR_OUT_OF_MEMORY};
  if (settings().on_shortage == OnShortage::kFail) return {refuse(request)};
  if (must_flush_first(request)) return {CUDA_ERROR_OUT_OF_MEMORY};
  const auto location = host_location(request.device);
  if (!location) return {refuse(request), true};
  auto& handles = records().host_handles;
  auto entry = handles.make_entry(charge_host(request.device, request.size_bytes, "memory that the program maps"));
  const CUmemAllocationProp host_properties = on_host(properties, *location);
  if (real<&cuMemCreate>()(handle, request.size_bytes, &host_properties, 0) != CUDA_SUCCESS)
    return {refuse(request), true};
  handles.keep(*handle, std::move(entry));
  note_spill(request.device, request.size_bytes, [&] {
    return "all " + format_bytes(request.size_bytes) + " of a " + request.call + " lie in " + describe(*location) +
           ", which the device " + describe_reads(request.device);
  });
  return {CUDA_SUCCESS};
}

// The driver's own memory, as far as the device limit allows.
CUresult take_counted(const Request& request, CountedMemory& memory, unsigned long long* key, uint64_t spared_bytes,
                      const Native& native) {
  auto entry = charge(request, spared_bytes);
  if (entry.empty()) return CUDA_ERROR_OUT_OF_MEMORY;
  auto margin = keep_margin(request);
  if (!margin) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = native();
  margin.reset();
  if (result == CUDA_ERROR_OUT_OF_MEMORY && !policy::is_small(request.size_bytes))
    are_full[static_cast<size_t>(request.device)].store(true);
  if (result == CUDA_SUCCESS) keep_counted(memory, *key, std::move(entry), request);
  return result;
}

// The driver's own memory, unless it must be placed, else what overflow() finds.
template <typename Overflow>
CUresult serve(const Request& request, CountedMemory& memory, unsigned long long* key, bool is_placed,
               uint64_t spared_bytes, const Native& native, const Overflow& overflow) {
  if (!is_placed) {
    const CUresult result = take_counted(request, memory, key, spared_bytes, native);
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
  }
  Overflowed done;
  try {
    done = overflow();
  } catch (const StoreError& error) {
    static constinit LogThrottle throttle;
    if (throttle.allows()) log_line(LogLevel::kError, {request.call, ": ", error.what()});
    done = {CUDA_ERROR_OUT_OF_MEMORY, !request.tagged_as};
  }
  // What was to spare the device: the driver was not asked yet, or the limit not for all that it has.
  const bool is_spared = is_placed || spared_bytes > 0;
  return is_spared && done.is_host_full ? take_counted(request, memory, key, 0, native) : done.result;
}

}  // namespace

int current_device() noexcept {
  const auto get_device = real<&cuCtxGetDevice>();
  CUdevice device = -1;
  return get_device != nullptr && get_device(&device) == CUDA_SUCCESS ? device : -1;
}

bool is_capturing(CUstream stream) noexcept {
  const auto ask = real<&cuStreamIsCapturing>();
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (ask == nullptr) return false;
  const CUresult result = ask(stream, &status);
  return result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
         (result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}

// Deferred frees count until they are done, so they are retried before the program is refused.
HostCharge charge_host(int device, uint64_t size_bytes, const char* purpose) {
  Core& core = Core::instance();
  const bool may_give_back = !is_capture_visible(device, nullptr);
  if (may_give_back) give_back_caches(core);
  LastResort last_resort(core, may_give_back);
  return retry_when_short(last_resort, [&] { return core.budgets.host.charge_outside_cgroups(size_bytes, purpose); });
}

void note_spill(int device, uint64_t size_bytes, const std::function<std::string()>& where) noexcept {
  if (!Core::instance().counters.note_spill(size_bytes)) return;
  try {
    log_line(LogLevel::kWarning,
             {"device ", std::to_string(device), " is full: ", where(), ". Said once; the statistics count on"});
  } catch (const std::exception&) {
    // No memory for the line: the program has its memory all the same.
  }
}

CUresult allocate(Request request, CUdeviceptr* address, const Native& native) {
  if (address == nullptr || request.size_bytes == 0 || !is_countable(request.device)) return native();
  if (request.is_in_stream && is_capturing(request.stream)) return native();
  request.tagged_as = choose_tag();
  request.is_left_to_lms = !request.tagged_as && is_left_to_lms();
  const bool is_placed = must_place(request);
  return serve(request, records().addresses, address, is_placed, spared_for_small(request), native,
               [&] { return overflow(request, address); });
}

CUresult create(Request request, const CUmemAllocationProp* properties, CUmemGenericAllocationHandle* handle,
                const Native& native) {
  const bool is_on_device = properties != nullptr && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (handle == nullptr || !is_on_device || !is_countable(properties->location.id)) return native();
  request.device = properties->location.id;
  request.is_left_to_lms = is_left_to_lms();
  // The whole handle would go to the host, so one larger than the room of small ones takes precedence over them.
  const uint64_t room_bytes = spared_for_small(request);
  return serve(request, records().handles, handle, false, request.size_bytes <= room_bytes ? room_bytes : 0, native,
               [&] { return create_on_host(request, *properties, handle); });
}

CUresult allocate_managed_by_driver(const Request& request, CUdeviceptr* address, const Native& native) {
  if (address == nullptr || !is_countable(request.device)) return native();
  auto entry = charge(request);
  const CUresult result = native();
  if (result != CUDA_SUCCESS) return result;
  if (entry.empty())
    forget_managed(*address);
  else
    keep_counted(records().addresses, *address, std::move(entry), request);
  return result;
}

}  // namespace ebbtide::preload
