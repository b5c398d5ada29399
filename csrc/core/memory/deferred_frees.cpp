#include "core/memory/deferred_frees.h"

#include <utility>

#include "base/log.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

// Waits for work queued in a context that is not the current one. False where that can't be made sure. A context
// that is gone took its work along.
bool wait_for(CUcontext context) noexcept {
  const auto is_gone = [](CUresult result) {
    return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT ||
           result == CUDA_ERROR_DEINITIALIZED;
  };
  CUcontext before = nullptr;
  if (driver().cuCtxGetCurrent(&before) != CUDA_SUCCESS) return false;
  CUresult result = driver().cuCtxSetCurrent(context);
  if (result != CUDA_SUCCESS) return is_gone(result);
  result = driver().cuCtxSynchronize();
  // The caller goes on in the context that was current.
  if (const CUresult back = driver().cuCtxSetCurrent(before);
      back != CUDA_SUCCESS && back != CUDA_ERROR_DEINITIALIZED) {
    log_line(LogLevel::kWarning,
             {"a free is put off: cuCtxSetCurrent failed with ", result_name(back), " on the way back"});
    return false;
  }
  if (result == CUDA_SUCCESS || is_gone(result)) return true;
  log_line(LogLevel::kInfo, {"a free is put off: cuCtxSynchronize failed with ", result_name(result)});
  return false;
}

}  // namespace

bool wait_before_free(std::span<const CUcontext> other_contexts) noexcept {
  for (const CUcontext context : other_contexts) {
    if (context != nullptr && !wait_for(context)) return false;
  }
  const CUresult result = driver().cuCtxSynchronize();
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED) return true;
  log_line(LogLevel::kInfo, {"a free is put off: cuCtxSynchronize failed with ", result_name(result)});
  return false;
}

size_t DeferredFrees::count() const {
  const MoreFrees* const more = more_.load();
  return count_.load() + (more != nullptr ? more->count() : 0);
}

std::optional<CaptureGate::Permit> DeferredFrees::try_enter(int device, bool may_wait) {
  if (!may_wait && holds_[static_cast<size_t>(device)] > 0) return std::nullopt;
  auto permit = gate_.try_enter();
  if (is_capture_visible(device, nullptr)) return std::nullopt;
  return permit;
}

bool DeferredFrees::try_destroy(std::shared_ptr<Allocation>& allocation, bool may_wait) noexcept {
  try {
    const ContextScope scope(allocation->device);
    const bool is_in_use = allocation->may_have_memory();
    // No other reference is left. A pinned backup can't be unpinned beside a capture: that would break it.
    const bool is_pinned = allocation->stored != nullptr && allocation->stored->is_pinned();
    if (!is_in_use && !is_pinned) {
      allocation.reset();
      return true;
    }
    const auto permit = try_enter(allocation->device, may_wait);
    if (!permit) return false;
    if (!is_in_use) {
      allocation.reset();
      return true;
    }
    if (!wait_before_free(allocation->other_contexts)) return false;
    for (Chunk& chunk : allocation->chunks) {
      if (!Backing::is_shared(chunk.backing) && chunk.backing->memory.is_on_host())
        host_pool_.recycle(allocation->device, allocation->address() + chunk.offset, chunk);
    }
    allocation.reset();
    return true;
  } catch (const std::exception& error) {
    log_line(LogLevel::kInfo, {"a free is put off: ", error.what()});
    return false;
  }
}

void DeferredFrees::keep(std::shared_ptr<Allocation> allocation) noexcept {
  const std::lock_guard lock(mutex_);
  allocation->next_deferred = std::move(first_);
  first_ = std::move(allocation);
  ++count_;
}

void DeferredFrees::destroy(std::shared_ptr<Allocation> allocation) noexcept {
  if (!try_destroy(allocation, false)) keep(std::move(allocation));
}

bool DeferredFrees::try_let_go(std::shared_ptr<BackupRecord>& stored) noexcept {
  if (!stored->is_pinned()) {
    stored.reset();
    return true;
  }
  // A pinned backup can't be unpinned beside a capture.
  const auto permit = gate_.try_enter();
  if (!permit || is_capture_visible(stored->device, nullptr)) return false;
  stored.reset();
  return true;
}

void DeferredFrees::keep(std::shared_ptr<BackupRecord> stored) noexcept {
  const std::lock_guard lock(mutex_);
  if (stored->is_deferred) {
    stored.reset();  // under the lock, where the list's own reference is not the last one
    return;
  }
  stored->is_deferred = true;
  stored->next_deferred = std::move(first_backup_);
  first_backup_ = std::move(stored);
  ++count_;
}

void DeferredFrees::let_go(std::shared_ptr<BackupRecord> stored) noexcept {
  if (!try_let_go(stored)) keep(std::move(stored));
}

std::shared_ptr<BackupRecord> DeferredFrees::take_backup() noexcept {
  const std::lock_guard lock(mutex_);
  if (first_backup_ == nullptr) return nullptr;
  std::shared_ptr<BackupRecord> stored = std::move(first_backup_);
  first_backup_ = std::move(stored->next_deferred);
  stored->is_deferred = false;
  --count_;
  return stored;
}

bool DeferredFrees::drain_backups() noexcept {
  bool has_freed = false;
  while (std::shared_ptr<BackupRecord> stored = take_backup()) {
    if (!try_let_go(stored)) {
      keep(std::move(stored));
      break;
    }
    has_freed = true;
  }
  return has_freed;
}

void DeferredFrees::destroy_all(std::vector<std::shared_ptr<Allocation>> allocations) noexcept {
  for (auto& allocation : allocations) destroy(std::move(allocation));
}

bool DeferredFrees::drain(bool may_wait) noexcept {
  if (count() == 0 || (all_holds_ > 0 && !may_wait)) return false;
  std::shared_ptr<Allocation> taken;
  {
    const std::lock_guard lock(mutex_);
    taken = std::move(first_);
    for (const Allocation* each = taken.get(); each != nullptr; each = each->next_deferred.get()) --count_;
  }
  bool has_freed = drain_backups();
  if (const MoreFrees* const more = more_.load()) has_freed = more->retry(may_wait) || has_freed;
  while (taken != nullptr) {
    std::shared_ptr<Allocation> allocation = std::exchange(taken, std::move(taken->next_deferred));
    if (try_destroy(allocation, may_wait)) {
      has_freed = true;
    } else {
      keep(std::move(allocation));
    }
  }
  return has_freed;
}

}  // namespace ebbtide
