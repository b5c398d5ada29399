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

// Waits for all that is queued in the device's primary context, which is current, and in these (null: none). False, with a line in the log, where that can't be made sure. The caller makes sure that no capture is under way.
bool wait_before_free(std::span<const CUcontext> other_contexts) noexcept;

// Frees of a layer above that wait for the same, and are tried again with ours.
struct MoreFrees {
  bool (*retry)(bool may_wait) noexcept;  // true if anything was freed
  size_t (*count)() noexcept;
};

// Destroys allocations that left the registry, and backups that were looked at after that, once no kernel can touch them any more (invariant 5); keeps those for which that can't be made sure now: during a capture, or when
// the synchronisation failed. They are tried again by drain(): at every later allocation and operation, and at the end of a capture. Needs no memory of its own.
class DeferredFrees {
 public:
  DeferredFrees(CaptureGate& gate, HostPool& host_pool) : gate_(gate), host_pool_(host_pool) {}

  // Never throws, never waits for an operation; waits for the device where something is resident.
  void destroy(std::shared_ptr<Allocation> allocation) noexcept;
  void destroy_all(std::vector<std::shared_ptr<Allocation>> allocations) noexcept;
  // As long as one lives what lies on the device is put off: bytes are on their way, and a free would wait for them with the device.
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
  // Lets go of a backup that somebody looked at: if nobody else has it, pinned memory is unpinned.
  void let_go(std::shared_ptr<BackupRecord> stored) noexcept;
  // Tries again what was put off. True if anything was freed. may_wait: also what is held, for which it waits; without it nothing is tried while anything is held.
  bool drain(bool may_wait = false) noexcept;
  size_t count() const;

  void retry_also(const MoreFrees& more) noexcept { more_.store(&more); }
  // None where a free may not wait for the device now. No capture begins while the permit lives.
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
