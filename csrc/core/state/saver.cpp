#include "core/state/saver.h"

#include <pthread.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/settings.h"
#include "core/state/core_settings.h"
#include "core/operation/operation.h"
#include "core/state/summary.h"
#include "driver/context.h"
#include "vmm/limbo.h"

namespace ebbtide {
namespace {

std::atomic<bool> forked_child{false};
std::atomic<Saver*> made_saver{nullptr};

// Nothing that large exists; catches negative sizes and keeps every sum far from overflow.
constexpr uint64_t kLargestAllocation = 1ULL << 46;

// What this thread was last refused so that its caller could flush: asked for again, it may spill.
struct RefusedCall {
  const Tag* tag = nullptr;
  int device = -1;
  uint64_t size_bytes = 0;
  friend bool operator==(const RefusedCall&, const RefusedCall&) = default;
};
thread_local RefusedCall refused_call;

// Different in every process, so that nobody can prepare bytes whose digests collide.
kernels::Digest make_seed() {
  std::random_device source;
  const auto word = [&] { return (static_cast<uint64_t>(source()) << 32) ^ source(); };
  return {word(), word()};
}

}  // namespace

bool is_forked_child() noexcept { return forked_child.load(std::memory_order_relaxed); }

void require_not_forked() {
  if (!is_forked_child()) return;
  throw StateError(
      "ebbtide can't be used in a forked child of the process that used it: start workers with spawn or forkserver, or "
      "exec");
}

Saver::Saver() : digest_seed(make_seed()) {
  if (const auto path = read_variable(Setting::kLedger)) {
    try {
      host_budget.join(Ledger::open(*path));
    } catch (const Error& error) {
      log_line(LogLevel::kError, {error.what(), "; this process counts its own host memory only"});
    }
  }
  read_core_settings(*this);
  say_malformed_variables();
}

Saver& Saver::instance() {
  static Saver* const saver = [] {
    ::pthread_atfork(nullptr, nullptr, [] { forked_child.store(true); });
    auto* const made = new Saver;
    summarise_at_exit(*made);
    made_saver.store(made);
    return made;
  }();
  return *saver;
}

Saver* Saver::instance_if_made() noexcept { return made_saver.load(); }

uint64_t free_device_bytes(int device) noexcept {
  try {
    const ContextScope scope(device);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    return driver().cuMemGetInfo(&free_bytes, &total_bytes) == CUDA_SUCCESS ? free_bytes : 0;
  } catch (...) {
    return 0;
  }
}

void rethrow_shortage(const DriverError& error, const DeviceBudget& budget, int device, uint64_t requested_bytes,
                      const std::string& purpose) {
  if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw error;
  const uint64_t free_bytes = free_device_bytes(device);
  throw OutOfMemory("device " + std::to_string(device) + " has too little memory for " + purpose + ": " +
                        format_bytes(requested_bytes) + " wanted, " + format_bytes(free_bytes) +
                        " free, device_limit " + format_bytes(budget.limit_bytes()) +
                        ". Pause another tag, or free memory of this or other processes",
                    device, {requested_bytes, free_bytes, budget.limit_bytes()});
}

bool Saver::give_back_caches(bool may_wait) noexcept {
  const size_t undos = limbo::count();
  if (undos > 0) {
    const auto permit = capture_gate.try_enter();
    limbo::retry(permit.has_value());
  }
  const bool has_freed = deferred_frees.drain(may_wait);
  return has_freed || limbo::count() < undos;
}

void Saver::record_out_of_memory(const Tag& tag, uint64_t size_bytes, const char* detail) noexcept {
  ++counters.alloc_failures;
  try {
    events.add({.kind = "out_of_memory", .tags = tag.name, .bytes = size_bytes, .detail = detail});
  } catch (...) {
    // No memory for the event's strings: the caller gets the error all the same.
  }
}

CUdeviceptr Saver::alloc(Tag& tag, const Policy& policy, int device, uint64_t size_bytes, void* stream) {
  require_not_forked();
  ++counters.alloc_calls;
  if (policy.backup != BackupKind::kNone) store_of(policy.backup);  // throws for kinds that have no store
  if (size_bytes == 0) throw InvalidArgument("an allocation can't have 0 bytes");
  if (size_bytes > kLargestAllocation) {
    throw InvalidArgument(std::to_string(size_bytes) + " bytes are more than any device has: is the size negative?");
  }
  const ContextScope scope(device);
  const uint64_t rounded = round_up(size_bytes, granularity(device));
  const uint64_t peer_generation = peers.refresh(false);
  const bool may_give_back = !is_capture_visible(device, stream);
  if (may_give_back) give_back_caches();
  const RefusedCall call{&tag, device, rounded};
  // During a capture nobody flushes, nor asks again.
  const bool may_flush = policy.flushes_first && may_give_back && !capture_gate.is_capturing();
  const bool may_spill = std::exchange(refused_call, {}) == call || !may_flush;
  for (bool is_last_try = false;; is_last_try = true) {
    try {
      auto allocation = build_allocation(*this, tag, policy, device, rounded, may_spill);
      allocation->sequence = registry.next_sequence();
      const CUdeviceptr address = allocation->address();
      registry.insert(std::move(allocation));
      peers.catch_up(peer_generation);
      return address;
    } catch (const FlushFirst&) {
      if (!is_last_try && may_give_back && give_back_caches()) continue;
      refused_call = call;
      throw;
    } catch (const OutOfMemory& error) {
      if (!is_last_try && may_give_back && give_back_caches(true)) continue;
      record_out_of_memory(tag, rounded, error.what());
      throw;
    } catch (const DriverError& error) {
      const bool is_shortage = error.code == CUDA_ERROR_OUT_OF_MEMORY;
      if (!is_last_try && is_shortage && may_give_back && give_back_caches(true)) continue;
      if (is_shortage) record_out_of_memory(tag, rounded, error.what());
      rethrow_shortage(error, device_budget, device, rounded, "tag '" + tag.name + "'");
    }
  }
}

void Saver::free(CUdeviceptr address) {
  if (free_if_ours(address)) return;
  throw InvalidArgument(
      "no allocation of ebbtide begins at this address: it was freed before, lies inside an allocation, or is "
      "somebody else's");
}

bool Saver::free_if_ours(CUdeviceptr address) {
  require_not_forked();
  ++counters.free_calls;
  bool is_ours = false;
  std::shared_ptr<Allocation> allocation = registry.take(address, &is_ours);
  if (allocation != nullptr) deferred_frees.destroy(std::move(allocation));
  return is_ours;
}

std::unique_ptr<Operation> Saver::claim(OperationKind kind, OperationRequest request) {
  require_not_forked();
  return Operation::claim(*this, kind, std::move(request));
}

LeaseInfo Saver::open_lease(const std::string& tag_name, const std::string& holder) {
  require_not_forked();
  peers.refresh(true);
  return registry.open_lease(tag_name, holder);
}

}  // namespace ebbtide
