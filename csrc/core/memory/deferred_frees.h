#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/memory/allocation.h"
#include "core/memory/capture_gate.h"
#include "core/memory/host_pool.h"
#include "driver/context.h"

namespace ebbtide {

// Waits for everything that is queued in the device's primary context, which is current, and in these contexts (null:
// none). Returns false, and logs a line, where it could not. The caller makes sure that no capture is under way.
bool wait_before_free(std::span<const CUcontext> other_contexts) noexcept;

// Deferred frees of a higher layer, which are retried together with those of the core.
struct MoreFrees {
  bool (*retry)(bool may_wait) noexcept;  // true if anything was freed
  size_t (*count)() noexcept;
};

// Destroys allocations that have left the registry, and backups that were in view until then, once no kernel can touch
// them (invariant 5). Where that cannot be made sure now (during a capture, under a Hold, after a failed
// synchronisation) it keeps them. drain() retries at every later allocation and operation, and at the end of a capture
// or of a background resume. It allocates no memory.
class DeferredFrees {
 public:
  DeferredFrees(CaptureGate& gate, HostPool& host_pool) : gate_(gate), host_pool_(host_pool) {}

  // Never throws, and never waits for an operation. Synchronises the device if anything is resident.
  void destroy(std::shared_ptr<Allocation> allocation) noexcept;
  void destroy_all(std::vector<std::shared_ptr<Allocation>> allocations) noexcept;
  // Defers frees of resident memory on one device for as long as it lives. Bytes are on their way to that device, and a
  // free would wait for them.
  class Hold {
   public:
    Hold(DeferredFrees& frees, int device) : frees_(frees), device_(static_cast<size_t>(device)) {
      ++frees_.holds_[device_];
      ++frees_.all_holds_;
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold() {
      --frees_.holds_[device_];
      --frees_.all_holds_;
    }

   private:
    DeferredFrees& frees_;
    const size_t device_;
  };
  // Drops a reference to a backup that was in view. The last one unpins pinned memory.
  void let_go(std::shared_ptr<BackupRecord> stored) noexcept;
  // Retries deferred frees. True if anything was freed. may_wait: also frees on devices under a Hold, for which it
  // waits; without it nothing is retried while there is any Hold.
  bool drain(bool may_wait = false) noexcept;
  size_t count() const;

  void retry_also(const MoreFrees& more) noexcept { more_.store(&more); }
  // Empty where a free may not wait for the device now. No capture begins while the permit lives.
  std::optional<CaptureGate::Permit> try_enter(int device, bool may_wait);

 private:
  bool try_destroy(std::shared_ptr<Allocation>& allocation, bool may_wait) noexcept;
  void keep(std::shared_ptr<Allocation> allocation) noexcept;
  bool try_let_go(std::shared_ptr<BackupRecord>& stored) noexcept;
  void keep(std::shared_ptr<BackupRecord> stored) noexcept;
  std::shared_ptr<BackupRecord> take_backup() noexcept;
  bool drain_backups() noexcept;

  CaptureGate& gate_;
  HostPool& host_pool_;
  std::mutex mutex_;
  std::shared_ptr<Allocation> first_;           // a list through next_deferred
  std::shared_ptr<BackupRecord> first_backup_;  // another
  std::atomic<size_t> count_{0};
  std::atomic<const MoreFrees*> more_{nullptr};
  std::array<std::atomic<int>, kMaxDevices> holds_{};
  std::atomic<int> all_holds_{0};
};

}  // namespace ebbtide
