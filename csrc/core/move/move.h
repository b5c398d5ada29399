#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/move/report.h"
#include "core/move/request.h"
#include "core/state/core.h"

namespace ebbtide {

using Allocations = std::vector<std::shared_ptr<Allocation>>;

// A step of an operation with the allocations that it holds: take them away, bring them back, copy them to other
// memory. Each kind names its claims, so that neither the registry nor the operation knows kinds. The operation calls
// claim(), prepare(), then run_device() and end_device() for each device, run_last() if no device failed, and settle()
// in any case.
class Move {
 public:
  // request outlives it. kind: the one that its report names.
  Move(Core& core, const OperationRequest& request, OperationKind kind) : core_(core), request_(request), kind_(kind) {}
  Move(const Move&) = delete;
  Move& operator=(const Move&) = delete;
  virtual ~Move() = default;

  OperationKind kind() const { return kind_; }
  virtual TagClaim claim() const = 0;
  // Of an allocation that it claims: whether its content moves, or only the rest of an earlier failure is put right.
  virtual bool moves_content(const Allocation& /*allocation*/) const { return true; }
  // Takes the memory and engines that the move will need. If it throws, settle() undoes all of it.
  virtual void prepare(const Allocations& allocations) = 0;
  // Whether kernels may still use the memory. Then the devices are synchronised before anything moves.
  virtual bool takes_memory_away() const { return true; }
  // The devices with something to move, after prepare().
  const std::set<int>& devices() const { return devices_; }
  // Moves everything on one device, whose context is current. Devices run side by side, each in its own thread.
  virtual void run_device(int device) = 0;
  // In the same thread, even if run_device() failed or could not begin.
  virtual void end_device(int /*device*/) noexcept {}
  // After all devices, where none failed.
  virtual void run_last() {}
  // Returns unused memory, and drops every reference to allocations.
  virtual void settle() noexcept = 0;
  // Once all has moved.
  virtual void count(Counters& /*counters*/, const ReportRow& /*total*/) const {}

  // A sentence for the caller beside the numbers, or "".
  const std::string& note() const { return note_; }

  const ReportRows& rows() const { return rows_; }
  bool has_released_any() const { return has_released_any_.load(); }

 protected:
  Core& core() { return core_; }
  const OperationRequest& request() const { return request_; }
  void add_device(int device) { devices_.insert(device); }
  void add_note(int device, const std::string& text) {
    note_ += (note_.empty() ? "device " : "; device ") + std::to_string(device) + ": " + text;
  }
  std::string note_;
  // In prepare() for every allocation, so that the threads of run_device() find their rows without changing the table.
  void add_row(const Allocation& allocation) { rows_[{allocation.tag->name, allocation.device}]; }
  ReportRow& row(const Allocation& allocation) { return rows_.at({allocation.tag->name, allocation.device}); }
  // From now on a failure leaves the operation midway.
  void note_released() { has_released_any_.store(true); }

 private:
  Core& core_;
  const OperationRequest& request_;
  const OperationKind kind_;
  std::set<int> devices_;
  ReportRows rows_;
  std::atomic<bool> has_released_any_{false};
};

// Whether more chunks than these share the memory.
inline bool has_others(const std::shared_ptr<Backing>& backing, size_t count) {
  return count < static_cast<size_t>(backing.use_count());
}

// By block of the allocation: whether the request lists it as unused.
inline std::vector<bool> unused_blocks(const Core& core, const OperationRequest& request,
                                       const Allocation& allocation) {
  if (!core.rules.skip.unused.load()) return std::vector<bool>(allocation.size_bytes() / kernels::kBlockBytes, false);
  return request.unused.covered_blocks({allocation.address(), allocation.size_bytes()}, kernels::kBlockBytes);
}

}  // namespace ebbtide
