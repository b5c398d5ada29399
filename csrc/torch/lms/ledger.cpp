#include "torch/lms/ledger.h"

#include <Python.h>
#include <c10/core/Allocator.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "api/ebbtide.h"
#include "policy/eviction.h"

namespace ebbtide::lms {
namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// For a wait for another thread, which may want the GIL. No lock is held at the construction and the destruction.
class GilReleased {
 public:
  GilReleased() : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* const state_;
};

Ledger* only = nullptr;

}  // namespace

// --- SavedStorage ---

SavedStorage::SavedStorage(Ledger& ledger, c10::Storage storage, uint64_t number)
    : ledger_(ledger),
      size_bytes_(storage.nbytes()),
      device_(storage.device()),
      address_(storage.data()),
      storage_(std::move(storage)),
      saved_(number) {}

SavedStorage::~SavedStorage() { ledger_.forget(*this); }

// --- Ledger ---

Ledger& Ledger::instance() {
  static Ledger& ledger = *new Ledger();
  return ledger;
}

Ledger::Ledger() {
  only = this;
  // A child may free its parent's graphs; it never finds the lock held by a thread that it does not have.
  ::pthread_atfork([] { only->mutex_.lock(); }, [] { only->mutex_.unlock(); }, [] { only->become_child(); });
}

void Ledger::become_child() noexcept {
  is_child_ = true;
  are_evictions_allowed_ = false;
  leaving_ = 0;
  mutex_.unlock();
}

void Ledger::allow_evictions(bool are_allowed) {
  std::unique_lock lock(mutex_);
  are_evictions_allowed_ = are_allowed && !is_child_;
  if (!are_allowed) moved_.wait(lock, [&] { return leaving_ == 0; });
}

std::shared_ptr<SavedStorage> Ledger::find_or_add(const c10::Storage& storage) {
  std::shared_ptr<SavedStorage> known;  // before the lock, which their destructor takes
  std::shared_ptr<SavedStorage> made;
  const std::lock_guard lock(mutex_);
  auto& entry = by_storage_[storage.unsafeGetStorageImpl()];
  known = entry.lock();
  // A storage that was resized since is another one. Neither leaves then, since each refers to it.
  if (known != nullptr && known->size_bytes_ == storage.nbytes() && known->address_ == storage.data()) return known;
  made = std::make_shared<SavedStorage>(*this, storage, ++last_number_);
  by_age_.emplace(made->saved_, made);
  entry = made;
  return made;
}

// Called by the destructor: nobody else refers to it any more, but a weak reference may still be listed.
void Ledger::forget(SavedStorage& saved) noexcept {
  c10::Storage dying;
  {
    const std::lock_guard lock(mutex_);
    by_age_.erase(saved.saved_);
    if (saved.storage_) {
      const auto found = by_storage_.find(saved.storage_.unsafeGetStorageImpl());
      if (found != by_storage_.end() && found->second.expired()) by_storage_.erase(found);
    }
    dying = std::move(saved.storage_);
    if (saved.on_host_ != nullptr) statistics_.host_bytes -= saved.size_bytes_;
  }
  if (saved.on_host_ != nullptr) ebbtide_give_host_memory(saved.on_host_, nullptr);
}

bool Ledger::can_leave(const SavedStorage& saved) const {
  if (saved.place_ != SavedStorage::Place::kDevice || saved.storage_.use_count() != 1) return false;
  std::atomic_thread_fence(std::memory_order_acquire);  // with the last release: what its last user wrote is there
  return saved.storage_.nbytes() == saved.size_bytes_ && saved.storage_.data() == saved.address_ &&
         ebbtide_is_away(saved.address_, saved.size_bytes_) == 0;
}

c10::Storage Ledger::bring_back(SavedStorage& saved) {
  const auto rests = [&] {
    return saved.place_ == SavedStorage::Place::kDevice || saved.place_ == SavedStorage::Place::kHost;
  };
  std::unique_lock lock(mutex_);
  if (is_child_ && !rests()) throw std::runtime_error("a thread of the parent was moving this tensor at the fork");
  moved_.wait(lock, rests);
  if (saved.place_ == SavedStorage::Place::kDevice) return saved.storage_;
  saved.place_ = SavedStorage::Place::kReturning;
  const Hooks hooks = hooks_;
  lock.unlock();
  double seconds = 0;
  c10::Storage returned;
  std::exception_ptr failure;
  try {
    c10::DataPtr data;
    hooks.allocate(saved.size_bytes_, &data);
    returned = c10::Storage(c10::Storage::use_byte_size_t(), saved.size_bytes_, std::move(data),
                            c10::GetAllocator(saved.device_.type()), /*resizable=*/true);
    const Stopwatch watch;
    std::memcpy(returned.mutable_data(), saved.on_host_, saved.size_bytes_);
    seconds = watch.seconds();
  } catch (...) {
    failure = std::current_exception();
  }
  void* no_longer_needed = nullptr;
  lock.lock();
  if (failure == nullptr) {
    try {
      by_storage_[returned.unsafeGetStorageImpl()] = by_age_.at(saved.saved_);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure == nullptr) {
    no_longer_needed = std::exchange(saved.on_host_, nullptr);
    saved.storage_ = returned;
    saved.address_ = returned.data();
    statistics_.loaded_bytes += saved.size_bytes_;
    statistics_.host_bytes -= saved.size_bytes_;
    statistics_.waited_seconds += seconds;
  }
  saved.place_ = failure == nullptr ? SavedStorage::Place::kDevice : SavedStorage::Place::kHost;
  lock.unlock();
  moved_.notify_all();
  if (failure != nullptr) std::rethrow_exception(failure);
  ebbtide_give_host_memory(no_longer_needed, nullptr);
  return returned;
}

// The lock is held at the call and at the return, and not in between.
bool Ledger::move_out(std::unique_lock<std::mutex>& lock, const std::shared_ptr<SavedStorage>& saved) noexcept {
  saved->place_ = SavedStorage::Place::kLeaving;
  by_storage_.erase(saved->storage_.unsafeGetStorageImpl());
  c10::Storage leaving = std::move(saved->storage_);
  ++leaving_;
  lock.unlock();
  const Stopwatch watch;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  void* on_host = nullptr;
  const int device = saved->device_.has_index() ? saved->device_.index() : 0;
  const bool has_room = ebbtide_take_host_memory(device, saved->size_bytes_, &on_host, &error) == EBBTIDE_OK;
  if (has_room) {
    std::memcpy(on_host, leaving.data(), saved->size_bytes_);
    leaving = c10::Storage();  // gives the device memory back
  }
  lock.lock();
  --leaving_;
  if (has_room) {
    saved->on_host_ = on_host;
    saved->place_ = SavedStorage::Place::kHost;
    ++statistics_.evictions;
    statistics_.evicted_bytes += saved->size_bytes_;
    statistics_.host_bytes += saved->size_bytes_;
    statistics_.waited_seconds += watch.seconds();
    ever_evicted_bytes_ += saved->size_bytes_;
  } else {
    saved->storage_ = std::move(leaving);
    saved->place_ = SavedStorage::Place::kDevice;
    try {
      by_storage_[saved->storage_.unsafeGetStorageImpl()] = saved;
      host_problem_ = error.message;
    } catch (const std::bad_alloc&) {
      // Views that are saved from now on know it a second time. It does not leave then: somebody else refers to it.
    }
  }
  moved_.notify_all();
  return has_room;
}

uint64_t Ledger::evict(uint64_t wanted_bytes) noexcept {
  // Outlives the lock: a last reference may be among them, and the destructor takes the lock.
  std::vector<std::shared_ptr<SavedStorage>> candidates;
  uint64_t freed_bytes = 0;
  try {
    std::vector<policy::Evictable> numbers;
    std::unique_lock lock(mutex_);
    host_problem_.clear();
    if (!are_evictions_allowed_) return 0;
    for (const auto& [number, entry] : by_age_) {
      candidates.push_back(entry.lock());
      const bool is_free = candidates.back() != nullptr && can_leave(*candidates.back());
      numbers.push_back({is_free ? candidates.back()->size_bytes_ : 0, UINT64_MAX - number});
    }
    for (const size_t index : policy::choose_evictions(numbers, wanted_bytes)) {
      const auto& saved = candidates[index];
      if (!are_evictions_allowed_) break;
      if (saved == nullptr || !can_leave(*saved)) continue;
      if (!move_out(lock, saved)) break;
      freed_bytes += saved->size_bytes_;
    }
    if (freed_bytes == 0 && leaving_ > 0) freed_bytes = await_others(lock);
  } catch (const std::bad_alloc&) {
    // No memory for the lists: nothing leaves.
  }
  return freed_bytes;
}

// What another thread evicts now is about to become free, and counts.
uint64_t Ledger::await_others(std::unique_lock<std::mutex>& lock) {
  const uint64_t before = ever_evicted_bytes_;
  uint64_t freed_bytes = 0;
  lock.unlock();
  {
    const GilReleased released;
    lock.lock();
    moved_.wait(lock, [&] { return leaving_ == 0 || ever_evicted_bytes_ != before; });
    freed_bytes = ever_evicted_bytes_ - before;
    lock.unlock();
  }
  lock.lock();
  return freed_bytes;
}

Statistics Ledger::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void Ledger::reset_statistics() {
  const std::lock_guard lock(mutex_);
  const uint64_t host_bytes = statistics_.host_bytes;
  statistics_ = {};
  statistics_.host_bytes = host_bytes;
}

std::string Ledger::host_problem() const {
  const std::lock_guard lock(mutex_);
  return host_problem_;
}

}  // namespace ebbtide::lms
