#include "preload/allocate.h"

#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "base/log_throttle.h"
#include "core/state/core.h"
#include "driver/bus.h"
#include "preload/resolver.h"
#include "preload/settings.h"
#include "vmm/host_location.h"

namespace ebbtide::preload {
namespace {

void note_spill(Core& core, const Request& request, const HostLocation& location) noexcept {
  if (!core.counters.note_spill(request.size_bytes)) return;
  try {
    log_line(LogLevel::kWarning,
             {"device ", std::to_string(request.device), " is full: all ", format_bytes(request.size_bytes), " of a ",
              request.call, " lie in ", describe(location), ", which the device ", describe_reads(request.device),
              ". Said once; the statistics count on"});
  } catch (const std::exception&) {
    // No memory for the line: the program has its handle all the same.
  }
}

// The program's own properties, except those that only device memory has.
CUmemAllocationProp on_host(CUmemAllocationProp properties, const HostLocation& location) {
  properties.location = location.where;
  properties.allocFlags.gpuDirectRDMACapable = 0;
  properties.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_NONE;
  return properties;
}

}  // namespace

CountedMemory& counted_addresses() {
  static auto* const instance = new CountedMemory;
  return *instance;
}
CountedMemory& counted_handles() {
  static auto* const instance = new CountedMemory;
  return *instance;
}
HostHandles& host_handles() {
  static auto* const instance = new HostHandles;
  return *instance;
}

Overflowed create_on_host(const Request& request, const CUmemAllocationProp& properties,
                          CUmemGenericAllocationHandle* handle) {
  if (settings().on_shortage == OnShortage::kFail) return {refuse(request)};
  if (must_flush_first(request)) return {CUDA_ERROR_OUT_OF_MEMORY};
  const auto location = host_location(request.device);
  if (!location) return {refuse(request), true};
  Core& core = Core::instance();
  try {
    auto entry =
        HostHandles::make_entry(charge_host(request.device, request.size_bytes, "memory that the program maps"));
    const CUmemAllocationProp host_properties = on_host(properties, *location);
    if (real<&cuMemCreate>()(handle, request.size_bytes, &host_properties, 0) != CUDA_SUCCESS)
      return {refuse(request), true};
    host_handles().keep(*handle, std::move(entry));
    note_spill(core, request, *location);
    return {CUDA_SUCCESS};
  } catch (const StoreError& error) {
    static constinit LogThrottle throttle;
    if (throttle.allows()) log_line(LogLevel::kError, {request.call, ": ", error.what()});
    return {CUDA_ERROR_OUT_OF_MEMORY, true};
  }
}

}  // namespace ebbtide::preload
