#include "torch/lms/ledger.h"

#include <c10/core/Allocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

#include "api/ebbtide.h"
#include "policy/lms/eviction.h"
#include "torch/lms/device_side.h"
#include "torch/lms/gil.h"
#include "torch/lms/optimizer_states.h"

namespace ebbtide::lms {
namespace {

Ledger* only = nullptr;
// A rate is that of the latest copies, as many as have these bytes at most.
constexpr double kRememberedBytes = 4e9;
// How often a storage is looked at before it counts as one that stays in use.
constexpr int kLooks = 64;
// In this thread an allocation is made ahead of need.
thread_local bool is_prefetching = false;

}  // namespace

// --- SavedStorage ---

SavedStorage::SavedStorage(Ledger& ledger, c10::Storage storage, c10::Stream stream, uint64_t number)
    : ledger_(ledger),
      size_bytes_(storage.nbytes()),
      device_(storage.device()),
      stream_(stream),
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
  leaving_ = arriving_ = 0;
  mutex_.unlock();
}

void Ledger::allow_evictions(bool are_allowed) {
  {
    Lock lock(mutex_);
    are_evictions_allowed_ = are_allowed && !is_child_;
    if (are_allowed) return;
    moved_.wait(lock, [&] { return leaving_ == 0 && arriving_ == 0; });
    // What has begun to leave stays.
    for (auto& [device, steps] : steps_) {
      for (const auto& [number, saved] : steps.storages) {
        const bool is_leaving = saved->place_ == SavedStorage::Place::kDevice && !saved->transit_.is_arrival;
        if (is_leaving && saved->transit_.host) retired_.push_back(std::exchange(saved->transit_, Transit()));
      }
    }
  }
  reap(/*waits_for_all=*/true);
}

std::shared_ptr<SavedStorage> Ledger::save(const c10::Storage& storage) {
  const c10::Device device = storage.device();
  const DeviceSide& side = side_of(device);
  const c10::Stream stream = side.current_stream(device);
  const uint64_t used_bytes = side.used_bytes(device);
  std::shared_ptr<SavedStorage> saved;
  std::shared_ptr<SavedStorage> other;  // outlives the lock, which its destructor takes
  {
    const Lock lock(mutex_);
    auto& entry = by_storage_[storage.unsafeGetStorageImpl()];
    saved = entry.lock();
    // A storage that was resized since is another one. Neither leaves then, since each refers to it.
    if (saved != nullptr && (saved->size_bytes_ != storage.nbytes() || saved->address_ != storage.data()))
      other = std::exchange(saved, nullptr);
    Steps& steps = steps_[device.index()];
    if (saved == nullptr) {
      if (steps.storages.empty() && steps.was_wanted) end_step(device, steps);
      saved = std::make_shared<SavedStorage>(*this, storage, stream, ++last_number_);
      by_age_.emplace(saved->saved_, saved);
      entry = saved;
      saved->number_ = steps.follower.saved(saved->size_bytes_, demand_bytes(used_bytes), now());
      steps.storages.emplace(saved->number_, saved.get());
      note_due(steps);
    }
    watch(steps, *saved);
    note_free(steps);
  }
  perform(device);
  return saved;
}

// Called by the destructor: nobody else refers to it any more, but a weak reference may still be listed.
void Ledger::forget(SavedStorage& saved) noexcept {
  c10::Storage dying;
  Transit transit;
  bool is_off = false;
  {
    const Lock lock(mutex_);
    by_age_.erase(saved.saved_);
    if (saved.storage_) {
      const auto found = by_storage_.find(saved.storage_.unsafeGetStorageImpl());
      if (found != by_storage_.end() && found->second.expired()) by_storage_.erase(found);
    }
    dying = std::move(saved.storage_);
    transit = std::exchange(saved.transit_, Transit());
    if (saved.place_ == SavedStorage::Place::kHost) statistics_.host_bytes -= saved.size_bytes_;
    forget_in_step(saved);
    is_off = !are_evictions_allowed_;
  }
  if (is_child_) {  // the parent's copy: a child has no driver to ask
    static_cast<void>(new Transit(std::move(transit)));
    return;
  }
  const DeviceSide& side = side_of(saved.device_);
  try {
    if (dying && transit.copy) transit.waited_seconds += side.come_after(transit.copy, saved.stream_);
  } catch (const std::exception&) {
    if (!transit.copy.end()) static_cast<void>(new c10::Storage(std::move(dying)));  // the copy may use it for ever
  }
  if (dying) side.let_go(std::move(dying), saved.stream_);
  if (!transit.host) return;
  retire(transit);
  if (is_off) reap();
}

bool Ledger::can_leave(const SavedStorage& saved) const {
  if (saved.place_ != SavedStorage::Place::kDevice || saved.storage_.use_count() != 1) return false;
  std::atomic_thread_fence(std::memory_order_acquire);  // with the last release: what its last user wrote is there
  return saved.storage_.nbytes() == saved.size_bytes_ && saved.storage_.data() == saved.address_ &&
         ebbtide_is_away(saved.address_, saved.size_bytes_) == 0;
}

c10::Storage Ledger::bring_back(SavedStorage& saved) {
  using Place = SavedStorage::Place;
  const DeviceSide& side = side_of(saved.device_);
  const c10::Stream stream = side.current_stream(saved.device_);
  const uint64_t used_bytes = side.used_bytes(saved.device_);
  c10::Storage storage;
  {
    Lock lock(mutex_);
    if (is_child_ && saved.place_ == Place::kMoving)
      throw std::runtime_error("a thread of the parent was moving this tensor at the fork");
    moved_.wait(lock, [&] { return saved.place_ != Place::kMoving; });
    want(saved, used_bytes);
    if (saved.place_ == Place::kHost) {
      load(lock, saved, stream, /*is_ahead=*/false);
    } else if (saved.transit_.is_arrival) {
      receive(lock, saved, stream);
    } else if (saved.transit_.host) {
      // A departure that was begun is of no use: who gets the storage may change it.
      retired_.push_back(std::exchange(saved.transit_, Transit()));
    }
    storage = saved.storage_;
  }
  perform(saved.device_);
  reap();
  return storage;
}

// The storage comes back to the device. The stream's work comes after its copy, unless the load is ahead of need. The
// lock is held at the call and at the return, and not in between; after a failure the storage is on the host as before.
void Ledger::load(Lock& lock, SavedStorage& saved, c10::Stream stream, bool is_ahead) {
  const DeviceSide& side = side_of(saved.device_);
  saved.place_ = SavedStorage::Place::kMoving;
  Transit departure = std::exchange(saved.transit_, Transit());
  lock.unlock();
  c10::Storage returned;
  Transit arrival;
  std::exception_ptr failure;
  try {
    c10::DataPtr data = side.allocate(saved.device_, saved.size_bytes_);
    returned = c10::Storage(c10::Storage::use_byte_size_t(), saved.size_bytes_, std::move(data),
                            c10::GetAllocator(saved.device_.type()), /*resizable=*/true);
    if (departure.copy) side.come_after(departure.copy, stream);  // the work of its own stream does already
    if (side.is_on_device(returned.data())) {
      std::string problem;
      arrival.copy = OwnedCopy::to_device(side.number_of(saved.device_), returned.mutable_data(), departure.host,
                                          saved.size_bytes_, side.handle_of(stream), &problem);
      if (!arrival.copy) throw std::runtime_error(problem);
      if (!is_ahead) arrival.waited_seconds = side.come_after(arrival.copy, stream);
    } else {
      std::memcpy(returned.mutable_data(), departure.host.address(), saved.size_bytes_);
    }
  } catch (...) {
    failure = std::current_exception();
    if (!arrival.copy.end()) static_cast<void>(new c10::Storage(std::move(returned)));  // the copy may use it for ever
    returned = c10::Storage();
  }
  lock.lock();
  if (failure == nullptr) {
    try {
      retired_.reserve(retired_.size() + 2);
      by_storage_[returned.unsafeGetStorageImpl()] = saved.weak_from_this();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure == nullptr) {
    saved.address_ = returned.data();
    saved.storage_ = std::move(returned);
    saved.place_ = SavedStorage::Place::kDevice;
    arrival.size_bytes = saved.size_bytes_;
    arrival.is_arrival = true;
    arrival.is_prefetch = is_ahead;
    arrival.host = std::move(departure.host);
    statistics_.loaded_bytes += saved.size_bytes_;
    statistics_.host_bytes -= saved.size_bytes_;
    statistics_.waited_seconds += arrival.waited_seconds;
    if (departure.copy) retired_.push_back(std::move(departure));
    if (is_ahead && arrival.copy) {
      saved.transit_ = std::move(arrival);
    } else {
      retired_.push_back(std::move(arrival));
    }
  } else {
    saved.transit_ = std::move(departure);
    saved.place_ = SavedStorage::Place::kHost;
  }
  moved_.notify_all();
  if (failure == nullptr) return;
  lock.unlock();
  arrival = Transit();
  returned = c10::Storage();
  lock.lock();
  std::rethrow_exception(failure);
}

// The storage is on the device, and its copy may be under way: the stream's work comes after it.
void Ledger::receive(Lock& lock, SavedStorage& saved, c10::Stream stream) {
  saved.place_ = SavedStorage::Place::kMoving;
  Transit arrival = std::exchange(saved.transit_, Transit());
  lock.unlock();
  std::exception_ptr failure;
  double seconds = 0;
  const bool is_in_time = arrival.copy.is_done();
  try {
    seconds = side_of(saved.device_).come_after(arrival.copy, stream);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  arrival.waited_seconds += seconds;
  statistics_.waited_seconds += seconds;
  saved.place_ = SavedStorage::Place::kDevice;
  moved_.notify_all();
  if (failure != nullptr) {
    saved.transit_ = std::move(arrival);
    std::rethrow_exception(failure);
  }
  if (arrival.is_prefetch) ++(is_in_time ? statistics_.prefetch_hits : statistics_.prefetch_late);
  retired_.push_back(std::move(arrival));
}

// Gives up its device memory, after a copy to the host if there is none yet. The lock is held at the call and at the
// return, and not in between.
bool Ledger::send_away(Lock& lock, SavedStorage& saved) noexcept {
  const DeviceSide& side = side_of(saved.device_);
  saved.place_ = SavedStorage::Place::kMoving;
  by_storage_.erase(saved.storage_.unsafeGetStorageImpl());
  c10::Storage leaving = std::move(saved.storage_);
  Transit transit = std::exchange(saved.transit_, Transit());
  ++leaving_;
  lock.unlock();
  std::string problem;
  double seconds = 0;
  bool has_left = false;
  try {
    if (!transit.copy) {
      transit.host = HostMemory::take(side.number_of(saved.device_), saved.size_bytes_, &problem);
      if (transit.host)
        transit.copy = OwnedCopy::to_host(side.number_of(saved.device_), transit.host, leaving.data(),
                                          saved.size_bytes_, side.handle_of(saved.stream_), &problem);
      if (!transit.copy) transit.host = HostMemory();
      transit.size_bytes = saved.size_bytes_;
    }
    if (transit.copy) {
      seconds = side.come_after(transit.copy, saved.stream_);
      transit.waited_seconds += seconds;
      has_left = true;
    }
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (has_left) side.let_go(std::move(leaving), saved.stream_);
  lock.lock();
  --leaving_;
  saved.transit_ = std::move(transit);
  if (has_left) {
    saved.place_ = SavedStorage::Place::kHost;
    ++statistics_.evictions;
    statistics_.evicted_bytes += saved.size_bytes_;
    statistics_.waited_seconds += seconds;
    statistics_.host_bytes += saved.size_bytes_;
    ever_evicted_bytes_ += saved.size_bytes_;
  } else {
    saved.storage_ = std::move(leaving);
    saved.place_ = SavedStorage::Place::kDevice;
    try {
      by_storage_[saved.storage_.unsafeGetStorageImpl()] = saved.weak_from_this();
      problem_ = problem;
    } catch (const std::bad_alloc&) {
      // Views that are saved from now on know it a second time. It does not leave then: somebody else refers to it.
    }
  }
  moved_.notify_all();
  return has_left;
}

uint64_t Ledger::evict(uint64_t wanted_bytes) noexcept {
  reap();
  try {
    {
      const Lock lock(mutex_);
      problem_.clear();
    }
    while (true) {
      Attempt attempt = evict_among(Candidates::kAll, wanted_bytes);
      if (attempt.freed_bytes == 0 && attempt.has_failed) {
        // The host may be full. It gets room from copies that nobody wants; and what was copied needs no more of it.
        reap(/*waits_for_all=*/true);
        attempt = evict_among(Candidates::kAll, wanted_bytes);
        if (attempt.freed_bytes == 0 && attempt.has_failed) attempt = evict_among(Candidates::kCopied, wanted_bytes);
      }
      if (attempt.freed_bytes > 0) return attempt.freed_bytes;
      if (!attempt.have_others_begun) return 0;
      if (const uint64_t freed_bytes = await_others(attempt); freed_bytes > 0) return freed_bytes;
    }
  } catch (const std::bad_alloc&) {
    return 0;  // no memory for the lists: nothing leaves
  }
}

Ledger::Attempt Ledger::evict_among(Candidates which, uint64_t wanted_bytes) {
  // Outlives the lock: a last reference may be among them, and the destructor takes the lock.
  std::vector<std::shared_ptr<SavedStorage>> candidates;
  std::vector<policy::Evictable> numbers;
  Attempt attempt;
  Lock lock(mutex_);
  if (!are_evictions_allowed_) return attempt;
  attempt.have_others_begun = leaving_ > 0;
  candidates.reserve(by_age_.size());
  for (const auto& [number, entry] : by_age_) {
    candidates.push_back(entry.lock());
    const SavedStorage* const saved = candidates.back().get();
    const bool is_free = saved != nullptr && can_leave(*saved) && (which == Candidates::kAll || saved->transit_.host);
    numbers.push_back({is_free ? saved->size_bytes_ : 0, UINT64_MAX - number});
  }
  for (const size_t index : policy::choose_evictions(numbers, wanted_bytes)) {
    const auto& saved = candidates[index];
    if (!are_evictions_allowed_) break;
    if (saved == nullptr || !can_leave(*saved)) continue;
    if (!send_away(lock, *saved)) {
      attempt.has_failed = true;
      break;
    }
    attempt.freed_bytes += saved->size_bytes_;
  }
  attempt.ever_evicted_bytes = ever_evicted_bytes_;
  return attempt;
}

uint64_t Ledger::reclaim(c10::Device device, uint64_t wanted_bytes) noexcept {
  if (is_prefetching) return 0;  // what is wanted later does not drive out what is wanted sooner
  const DeviceSide& side = side_of(device);
  const uint64_t limit_bytes = side.limit_bytes(device);
  const uint64_t room_bytes = limit_bytes - std::min(limit_bytes, side.held_bytes(device));
  // Where there is room for it, but not in one piece, all of it has to leave.
  const uint64_t short_bytes = room_bytes < wanted_bytes ? wanted_bytes - room_bytes : wanted_bytes;
  {
    const Lock lock(mutex_);
    if (!are_evictions_allowed_) return 0;
    ++statistics_.reclaims;
    Steps& steps = steps_[device.index()];
    steps.follower.missed(demand_bytes(limit_bytes + short_bytes));
    if (steps.follower.is_following()) steps.short_bytes += short_bytes;
  }
  const uint64_t freed_bytes = evict(wanted_bytes);
  return freed_bytes > 0 ? freed_bytes : OptimizerStates::instance().make_room(short_bytes);
}

// What other threads have evicted since the attempt counts. 0: nothing, but what they began to copy may leave now.
uint64_t Ledger::await_others(const Attempt& attempt) {
  const GilReleased released;
  Lock lock(mutex_);
  moved_.wait(lock, [&] { return leaving_ == 0 || ever_evicted_bytes_ != attempt.ever_evicted_bytes; });
  return ever_evicted_bytes_ - attempt.ever_evicted_bytes;
}

// --- Steps ---

// A bus of PCIe 4 until copies have shown another rate.
double Ledger::Rate::bytes_per_second() const { return seconds > 0 ? bytes / seconds : 20e9; }

void Ledger::Rate::add(const Rate& other) {
  bytes += other.bytes;
  seconds += other.seconds;
  if (bytes < kRememberedBytes) return;
  bytes /= 2;
  seconds /= 2;
}

// Without the time that copies cost: a plan that hides them shall not count on it.
double Ledger::now() const {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_start).count() - statistics_.waited_seconds;
}

void Ledger::end_step(c10::Device device, Steps& steps) {
  const uint64_t limit_bytes = side_of(device).limit_bytes(device);
  if (std::exchange(steps.limit_bytes, limit_bytes) != limit_bytes) steps.margin_bytes = 0;
  // Free memory lies in pieces. A plan that fills the device to its limit is short of memory in spite of it.
  steps.margin_bytes = std::min(steps.margin_bytes + std::exchange(steps.short_bytes, 0), limit_bytes / 4);
  steps.follower.end_step({limit_bytes - steps.margin_bytes, out_.bytes_per_second(), in_.bytes_per_second()});
  steps.due = {};
  steps.was_wanted = false;
}

// The follower's actions are those of its last call alone.
void Ledger::note_due(Steps& steps) {
  const policy::StepActions& actions = steps.follower.actions();
  const auto append = [](std::vector<uint64_t>& to, const std::vector<uint64_t>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(steps.due.copies_out, actions.copies_out);
  append(steps.due.releases, actions.releases);
  append(steps.due.loads, actions.loads);
}

void Ledger::watch(Steps& steps, SavedStorage& saved) {
  if (steps.storages.contains(saved.number_)) steps.watched[saved.number_] = kLooks;
}

// Nobody says when the program lets a saved tensor go, so each is looked at for a while. What stays in use, such as a
// parameter, is not looked at for ever.
void Ledger::note_free(Steps& steps) {
  for (auto watched = steps.watched.begin(); watched != steps.watched.end();) {
    auto& [number, looks_left] = *watched;
    const SavedStorage& saved = *steps.storages.at(number);
    const bool is_free = saved.place_ == SavedStorage::Place::kDevice && saved.storage_.use_count() == 1;
    if (is_free) {
      steps.follower.became_free(number);
      note_due(steps);
    }
    watched = is_free || --looks_left == 0 ? steps.watched.erase(watched) : std::next(watched);
  }
}

// The program reads it now.
void Ledger::want(SavedStorage& saved, uint64_t used_bytes) {
  Steps& steps = steps_[saved.device_.index()];
  if (!steps.storages.contains(saved.number_)) return;  // of an earlier step
  steps.was_wanted = true;
  steps.follower.wanted(saved.number_, demand_bytes(used_bytes), now());
  note_due(steps);
  note_free(steps);
  watch(steps, saved);
}

// It is about to die.
void Ledger::forget_in_step(SavedStorage& saved) noexcept {
  Steps& steps = steps_[saved.device_.index()];
  if (steps.storages.erase(saved.number_) == 0) return;
  steps.watched.erase(saved.number_);
  try {
    steps.follower.dropped(saved.number_);
    note_due(steps);
  } catch (const std::bad_alloc&) {
    // The step will not look like its plan, and storages leave on demand.
  }
}

// What the plan wants to happen now. What no longer applies is left out.
void Ledger::perform(c10::Device device) noexcept {
  std::vector<std::shared_ptr<SavedStorage>> kept;  // outlives the lock: their destructor takes it
  Lock lock(mutex_);
  Steps& steps = steps_[device.index()];
  const policy::StepActions due = std::exchange(steps.due, {});
  if (!are_evictions_allowed_) return;
  const auto find = [&](uint64_t number) -> SavedStorage* {
    const auto found = steps.storages.find(number);
    if (!are_evictions_allowed_ || found == steps.storages.end()) return nullptr;
    kept.push_back(found->second->weak_from_this().lock());
    return kept.back().get();
  };
  try {
    kept.reserve(due.copies_out.size() + due.releases.size() + due.loads.size());
    for (const uint64_t number : due.copies_out) {
      if (SavedStorage* const saved = find(number)) begin_departure(lock, *saved);
    }
    for (const uint64_t number : due.releases) {
      SavedStorage* const saved = find(number);
      if (saved != nullptr && can_leave(*saved)) send_away(lock, *saved);
    }
    for (const uint64_t number : due.loads) {
      if (SavedStorage* const saved = find(number)) begin_arrival(lock, *saved);
    }
  } catch (const std::bad_alloc&) {
    // What was left out leaves on demand, or comes back when it is wanted.
  }
}

// Its copy to the host begins; its device memory stays. The lock is held at the call and at the return, and not in
// between.
void Ledger::begin_departure(Lock& lock, SavedStorage& saved) noexcept {
  if (!can_leave(saved) || saved.transit_.host) return;
  saved.place_ = SavedStorage::Place::kMoving;
  ++leaving_;
  lock.unlock();
  std::string problem;
  Transit transit;
  const DeviceSide& side = side_of(saved.device_);
  transit.host = HostMemory::take(side.number_of(saved.device_), saved.size_bytes_, &problem);
  transit.size_bytes = saved.size_bytes_;
  if (transit.host)
    transit.copy = OwnedCopy::to_host(side.number_of(saved.device_), transit.host, saved.address_, saved.size_bytes_,
                                      side.handle_of(saved.stream_), &problem);
  if (!transit.copy) transit = Transit();
  lock.lock();
  --leaving_;
  saved.transit_ = std::move(transit);
  saved.place_ = SavedStorage::Place::kDevice;
  moved_.notify_all();
}

// It gets device memory, if there is any without an eviction, and its copy to the device begins. The lock is held at
// the call and at the return, and not in between.
void Ledger::begin_arrival(Lock& lock, SavedStorage& saved) noexcept {
  if (saved.place_ != SavedStorage::Place::kHost) return;
  ++arriving_;
  try {
    is_prefetching = true;
    load(lock, saved, side_of(saved.device_).current_stream(saved.device_), /*is_ahead=*/true);
  } catch (const std::exception&) {
    // It stays on the host until it is wanted.
  }
  is_prefetching = false;
  --arriving_;
  moved_.notify_all();
}

// Nobody wants its bytes, but its copy may be under way.
void Ledger::retire(Transit& transit) noexcept {
  try {
    const Lock lock(mutex_);
    retired_.push_back(std::move(transit));
  } catch (const std::bad_alloc&) {
    // The caller's ends then, which waits for the copy.
  }
}

// Ends the copies that are complete, or waits for all of them, and gives their host memory back.
void Ledger::reap(bool waits_for_all) noexcept {
  std::vector<Transit> transits;
  {
    const Lock lock(mutex_);
    if (is_child_) return;
    transits.swap(retired_);
  }
  const auto complete = std::partition(transits.begin(), transits.end(), [&](const Transit& transit) {
    return transit.copy && !transit.copy.is_done() && !waits_for_all;
  });
  double hidden_seconds = 0, waited_seconds = 0;
  Rate in, out;
  std::for_each(complete, transits.end(), [&](Transit& transit) {
    double seconds = 0;
    const auto begin = std::chrono::steady_clock::now();
    transit.copy.end(&seconds);
    if (waits_for_all) {
      const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      transit.waited_seconds += waited;
      waited_seconds += waited;
    }
    hidden_seconds += std::max(0.0, seconds - transit.waited_seconds);
    Rate& rate = transit.is_arrival ? in : out;
    rate.seconds += seconds;
    if (seconds > 0) rate.bytes += static_cast<double>(transit.size_bytes);
  });
  transits.erase(complete, transits.end());  // outside the lock: gives host memory back
  bool is_off = false;
  try {
    const Lock lock(mutex_);
    is_off = !are_evictions_allowed_;
    statistics_.hidden_seconds += hidden_seconds;
    statistics_.waited_seconds += waited_seconds;
    in_.add(in);
    out_.add(out);
    retired_.reserve(retired_.size() + transits.size());
    std::move(transits.begin(), transits.end(), std::back_inserter(retired_));
  } catch (const std::bad_alloc&) {
    // Then they end here, which waits for them.
  }
  // What is kept for the next step is of no use then. During a capture it stays, until the next call.
  if (is_off) ebbtide_trim_host_memory(nullptr);
}

Statistics Ledger::statistics() {
  reap();
  const Lock lock(mutex_);
  return statistics_;
}

void Ledger::reset_statistics() {
  reap();
  const Lock lock(mutex_);
  const uint64_t host_bytes = statistics_.host_bytes;
  statistics_ = {};
  statistics_.host_bytes = host_bytes;
}

std::string Ledger::problem() const {
  const Lock lock(mutex_);
  return problem_;
}

}  // namespace ebbtide::lms
