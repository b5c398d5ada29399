#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "core/memory/capture_gate.h"
#include "core/memory/deferred_frees.h"
#include "core/budget/device_budget.h"
#include "core/transfer/engine_pool.h"
#include "core/state/event_log.h"
#include "core/budget/host_budget.h"
#include "core/memory/host_pool.h"
#include "core/registry/peer_access.h"
#include "core/budget/pinned_budget.h"
#include "core/registry/registry.h"
#include "core/registry/slots.h"
#include "core/allocate/spill.h"
#include "policy/chunking.h"

// The one core of a process: what there is, and the calls on it. Leaked on purpose: frees may come after static destructors have run (invariant 6).
namespace ebbtide {

class Operation;
class PendingResume;

struct Counters {
  std::atomic<uint64_t> alloc_calls{0}, free_calls{0}, alloc_failures{0}, pauses{0}, resumes{0}, operation_failures{0};
  std::atomic<uint64_t> bytes_paused{0}, bytes_resumed{0}, bytes_to_host{0}, bytes_to_device{0};
  std::atomic<uint64_t> bytes_clean{0}, bytes_unused{0}, bytes_constant{0};
  std::atomic<uint64_t> spills{0}, bytes_spilled{0}, bytes_promoted{0};
  // Whether it is the first of the process, which is said.
  bool note_spill(uint64_t host_bytes) {
    bytes_spilled += host_bytes;
    return spills++ == 0;
  }
};

// A part of the address space.
struct AddressRange {
  CUdeviceptr address = 0;
  size_t size_bytes = 0;
  CUdeviceptr end() const { return address + size_bytes; }
};

struct OperationRequest {
  TagRequest tags;
  TagRequest resume_tags;            // swap: what comes back; tags is what leaves
  std::optional<BackupKind> backup;  // pause: instead of each allocation's policy
  std::shared_ptr<Moved> moved;      // pause: filled with what has moved
  std::optional<bool> retain;        // resume: instead of each allocation's policy
  // pause, resume: by address; nobody uses what lies in them, as of the moment when lease number unused_as_of was the newest. Ignored where a tag was leased after that.
  std::vector<AddressRange> unused;
  uint64_t unused_as_of = 0;
  std::vector<AddressRange> order;  // resume: what comes first; the rest follows in the order of allocation
};

// What a pause may leave where it is. Each can be switched off.
struct SkipRules {
  std::atomic<bool> clean{true}, unused{true}, constant{true};
  std::atomic<bool> must_compare{false};  // bytes are compared where a digest says that nothing changed
};

class Saver {
 public:
  // Limits as the environment sets them. A process has one core, instance(); tests make their own.
  Saver();
  static Saver& instance();
  // Null before the first use of instance().
  static Saver* instance_if_made() noexcept;

  // A new resident, zeroed allocation; size rounded up to the granularity. stream: the caller's, for capture detection only; may be null. Throws OutOfMemory after trying what could still be given back;
  // FlushFirst, which is one, as the policy says.
  CUdeviceptr alloc(Tag& tag, const Policy& policy, int device, uint64_t size_bytes, void* stream = nullptr);
  // Throws InvalidArgument for an address that no allocation begins at.
  void free(CUdeviceptr address);
  // The same, but false for such an address.
  bool free_if_ours(CUdeviceptr address);

  std::unique_ptr<Operation> claim(OperationKind kind, OperationRequest request);

  // The entry of a region.
  LeaseInfo open_lease(const std::string& tag_name, const std::string& holder);

  // Gives back what ebbtide itself still keeps: undos that failed, frees that were put off. True if any of it went. Does nothing that a capture forbids while one is known.
  // may_wait: before somebody is told that memory is out, frees that a resume in the background puts off are worth waiting for it.
  bool give_back_caches(bool may_wait = false) noexcept;

  Registry registry;
  CaptureGate capture_gate;
  DeviceBudget device_budget;
  HostBudget host_budget;
  HostPool host_pool{host_budget};
  OverflowRules overflow;
  PinnedBudget pinned_budget;
  EnginePool engines{host_budget, pinned_budget};
  SkipRules skip;
  std::atomic<uint64_t> shared_handle_bytes{policy::kSharedHandleBytes};  // at most behind one handle; 0: none share
  AddressArena spare_addresses;                                           // of memory that waits for its place
  const kernels::Digest digest_seed;
  DeferredFrees deferred_frees{capture_gate, host_pool};
  PeerAccess peers{registry, deferred_frees};
  SlotTable slots{registry};
  EventLog events;
  Counters counters;

 private:
  void record_out_of_memory(const Tag& tag, uint64_t size_bytes, const char* detail) noexcept;
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
