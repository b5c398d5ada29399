#pragma once

#include "base/fork.h"
#include "core/budget/device_budget.h"
#include "core/budget/host_budget.h"
#include "core/budget/pinned_budget.h"
#include "core/memory/capture_gate.h"
#include "core/memory/deferred_frees.h"
#include "core/memory/host_pool.h"
#include "core/registry/peer_access.h"
#include "core/registry/registry.h"
#include "core/registry/slots.h"
#include "core/state/counters.h"
#include "core/state/event_log.h"
#include "core/state/rules.h"
#include "core/state/spare_backups.h"
#include "core/transfer/engine_pool.h"

// The state of a process's core. The folders above act on it: core/allocate, core/operation.
namespace ebbtide {

struct Budgets {
  DeviceBudget device;
  DeviceMargin device_margin;
  HostBudget host;
  PinnedBudget pinned;
};

struct Core {
  // Rules and limits as the environment sets them. A process has one core, instance(); tests make their own.
  Core();
  // Leaked on purpose: frees may come after static destructors have run (invariant 6).
  static Core& instance();
  // Null before the first use of instance().
  static Core* instance_if_made() noexcept;

  Budgets budgets;  // outlives all charges
  Registry registry;
  CaptureGate capture_gate;
  HostPool host_pool{budgets.host};
  Rules rules;
  EnginePool engines{budgets.host, budgets.pinned};
  AddressArena spare_addresses;  // of memory that waits for its place
  const kernels::Digest digest_seed;
  DeferredFrees deferred_frees{capture_gate, host_pool};
  PeerAccess peers{registry, deferred_frees};
  SpareBackups spare_backups{budgets.host, registry, deferred_frees, peers};
  SlotTable slots{registry};
  EventLog events;
  Counters counters;
};

// Throws StateError in a forked child, where neither the device nor any lock can be used (invariant 10).
void require_not_forked();

}  // namespace ebbtide
