#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "core/capture_gate.h"
#include "core/deferred_frees.h"
#include "core/device_budget.h"
#include "core/event_log.h"
#include "core/host_budget.h"
#include "core/registry.h"
#include "core/slots.h"
#include "core/staging_pool.h"

// The one core of a process: what there is, and the calls on it. Leaked on purpose: frees may come after static destructors have run (invariant 6).
namespace ebbtide {

class Operation;

struct Counters {
  std::atomic<uint64_t> alloc_calls{0}, free_calls{0}, alloc_failures{0}, pauses{0}, resumes{0}, operation_failures{0};
  std::atomic<uint64_t> bytes_paused{0}, bytes_resumed{0}, bytes_to_host{0}, bytes_to_device{0};
};

struct OperationRequest {
  TagRequest tags;
  std::optional<BackupKind> backup;  // pause: instead of each allocation's policy
};

class Saver {
 public:
  // Limits as the environment sets them. A process has one core, instance(); tests make their own.
  Saver();
  static Saver& instance();

  // A new resident, zeroed allocation; size rounded up to the granularity. stream: the caller's, for capture detection only; may be null. Throws OutOfMemory after trying what could still be given back.
  CUdeviceptr alloc(Tag& tag, const Policy& policy, int device, uint64_t size_bytes, void* stream = nullptr);
  // Throws InvalidArgument for an address that no allocation begins at.
  void free(CUdeviceptr address);

  std::unique_ptr<Operation> claim(OperationKind kind, const OperationRequest& request);

  // Gives back what ebbtide itself still keeps: undos that failed, frees that were put off. True if any of it went. Does nothing that a capture forbids while one is known.
  bool give_back_caches() noexcept;

  Registry registry;
  CaptureGate capture_gate;
  DeviceBudget device_budget;
  HostBudget host_budget;
  StagingPool staging{host_budget};
  DeferredFrees deferred_frees{capture_gate};
  SlotTable slots{registry};
  EventLog events;
  Counters counters;

 private:
  void record_out_of_memory(const Tag& tag, uint64_t size_bytes, const char* detail) noexcept;
  std::shared_ptr<Allocation> build(Tag& tag, const Policy& policy, int device, uint64_t size_bytes);
};

// Throws StateError in a forked child, where neither the device nor anybody's locks can be used (invariant 10).
void require_not_forked();
bool is_forked_child() noexcept;

// What the driver says is free on the device, bytes; 0 where it does not say.
uint64_t free_device_bytes(int device) noexcept;

// error as an OutOfMemory with numbers if it is the driver's; rethrows anything else.
[[noreturn]] void rethrow_shortage(const DriverError& error, const DeviceBudget& budget, int device,
                                   uint64_t requested_bytes, const std::string& purpose);

}  // namespace ebbtide
