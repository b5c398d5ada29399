#include "torch/lms/ledger.h"

#include <c10/core/Allocator.h>
#include <pthread.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <new>
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

std::mutex* mutex_over_fork = nullptr;

}  // namespace

// --- SavedStorage ---

SavedStorage::SavedStorage(Ledger& ledger, c10::Storage storage, uint64_t number)
    : ledger_(ledger),
      size_bytes_(storage.nbytes()),
      device_(storage.device()),
      storage_(std::move(storage)),
      saved_(number) {}

SavedStorage::~SavedStorage() { ledger_.forget(*this); }

// --- Ledger ---

Ledger& Ledger::instance() {
  static Ledger& ledger = *new Ledger();
  return ledger;
}

Ledger::Ledger() {
  mutex_over_fork = &mutex_;
  // A child may free its parent's graphs; it never finds the lock held by a thread that it does not have.
  ::pthread_atfork([] { mutex_over_fork->lock(); }, [] { mutex_over_fork->unlock(); },
                   [] { mutex_over_fork->unlock(); });
}

std::shared_ptr<SavedStorage> Ledger::find_or_add(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  auto& entry = by_storage_[storage.unsafeGetStorageImpl()];
  if (auto known = entry.lock()) return known;
  const auto made = std::make_shared<SavedStorage>(*this, storage, ++last_number_);
  entry = made;
  by_age_.emplace(made->saved_, made);
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
  return saved.place_ == SavedStorage::Place::kDevice && saved.storage_.use_count() == 1;
}

c10::Storage Ledger::bring_back(SavedStorage& saved) {
  std::unique_lock lock(mutex_);
  moved_.wait(
      lock, [&] { return saved.place_ == SavedStorage::Place::kDevice || saved.place_ == SavedStorage::Place::kHost; });
  if (saved.place_ == SavedStorage::Place::kDevice) return saved.storage_;
  saved.place_ = SavedStorage::Place::kReturning;
  lock.unlock();
  const Stopwatch watch;
  c10::Storage returned;
  std::exception_ptr failure;
  try {
    c10::Allocator* const allocator = c10::GetAllocator(saved.device_.type());
    returned = c10::Storage(c10::Storage::use_byte_size_t(), saved.size_bytes_, allocator, /*resizable=*/true);
    std::memcpy(returned.mutable_data(), saved.on_host_, saved.size_bytes_);
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
    ++statistics_.loads;
    statistics_.loaded_bytes += saved.size_bytes_;
    statistics_.host_bytes -= saved.size_bytes_;
    statistics_.waited_seconds += watch.seconds();
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
  const bool has_room = ebbtide_take_host_memory(saved->size_bytes_, &on_host, &error) == EBBTIDE_OK;
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
    host_problem_.clear();
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
    for (const auto& [number, entry] : by_age_) {
      candidates.push_back(entry.lock());
      const bool is_free = candidates.back() != nullptr && can_leave(*candidates.back());
      numbers.push_back({is_free ? candidates.back()->size_bytes_ : 0, UINT64_MAX - number});
    }
    for (const size_t index : policy::choose_evictions(numbers, wanted_bytes)) {
      const auto& saved = candidates[index];
      if (saved == nullptr || !can_leave(*saved)) continue;
      if (!move_out(lock, saved)) break;
      freed_bytes += saved->size_bytes_;
    }
    if (freed_bytes == 0 && leaving_ > 0) {  // what another thread evicts now is about to become free, and counts
      const uint64_t before = statistics_.evicted_bytes;
      moved_.wait(lock, [&] { return leaving_ == 0 || statistics_.evicted_bytes != before; });
      freed_bytes = statistics_.evicted_bytes - before;
    }
  } catch (const std::bad_alloc&) {
    // No memory for the lists: nothing leaves.
  }
  return freed_bytes;
}

Statistics Ledger::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics found = statistics_;
  found.saved_count = by_age_.size();
  for (const auto& [storage, entry] : by_storage_) {
    // Not lock(): the last reference must not die under the mutex.
    if (!entry.expired()) found.saved_bytes += storage->nbytes();
  }
  return found;
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
