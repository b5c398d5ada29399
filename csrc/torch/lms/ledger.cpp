#include "torch/lms/ledger.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "api/ebbtide.h"
#include "torch/lms/device_side.h"
#include "torch/lms/gil.h"
#include "torch/lms/optimizer_states.h"
#include "torch/lms/weights.h"

namespace ebbtide::lms {
namespace {

Ledger* only_ledger = nullptr;

// Of the pages of what leaves, its neighbours keep some: two of torch's.
constexpr uint64_t kSharedPageBytes = uint64_t{40} << 20;
// More than is short leaves on demand, a part of the limit in so many: torch waits for the device each time.
constexpr uint64_t kOnDemandPart = 64;
// By so much of the limit a margin grows at least that has not sufficed.
constexpr uint64_t kMarginPart = 64;

}  // namespace

thread_local bool Ledger::is_prefetching_ = false;

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
  only_ledger = this;
  // A child may free its parent's graphs; it never finds the lock held by a thread that it does not have.
  ::pthread_atfork([] { only_ledger->mutex_.lock(); }, [] { only_ledger->mutex_.unlock(); },
                   [] { only_ledger->become_child(); });
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
    forget_rest();
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
  const DeviceSide::Usage usage = side.usage(device);
  std::shared_ptr<SavedStorage> saved;
  std::shared_ptr<SavedStorage> other;  // outlives the lock, which its destructor takes
  await_marks(device);
  {
    const Lock lock(mutex_);
    auto& entry = by_storage_[storage.unsafeGetStorageImpl()];
    saved = entry.lock();
    // A storage that was resized since is another one. Neither leaves then, since each refers to it.
    if (saved != nullptr && (saved->size_bytes_ != storage.nbytes() || saved->address_ != storage.data()))
      other = std::exchange(saved, nullptr);
    const bool is_new = saved == nullptr;
    if (is_new) {
      saved = std::make_shared<SavedStorage>(*this, storage, stream, ++last_number_);
      by_age_.emplace(saved->saved_, saved);
      entry = saved;
    }
    if (!rest_.is_on()) note_saved(*saved, is_new, usage);
  }
  perform(device);
  return saved;
}

void Ledger::note_saved(SavedStorage& saved, bool is_new, const DeviceSide::Usage& usage) {
  const uint64_t used_bytes = usage.bytes;
  Steps& steps = is_new ? steps_now(saved.device_, usage) : steps_[saved.device_.index()];
  steps.follower.take_give_back();  // too late for a step that saves before it calls a module
  const policy::NewStorage named = name_storage(saved.storage_, steps, used_bytes);
  saved.stays_ |= named.stays;
  if (is_new) {
    saved.number_ = steps.follower.saved(named, demand_bytes(used_bytes), now());
    steps.storages.emplace(saved.number_, &saved);
    note_due(steps);
  } else if (steps.storages.contains(saved.number_)) {
    steps.follower.saved_again(saved.number_, named);
  }
  note_flushes(saved.device_, steps, usage);
  watch(steps, saved);
  note_free(steps);
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
    end_rest_if_over();  // before the next step calls modules
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

c10::Storage Ledger::bring_back(SavedStorage& saved) {
  using Place = SavedStorage::Place;
  const DeviceSide& side = side_of(saved.device_);
  const c10::Stream stream = side.current_stream(saved.device_);
  const DeviceSide::Usage usage = side.usage(saved.device_);
  c10::Storage storage;
  {
    Lock lock(mutex_);
    if (is_child_ && saved.place_ == Place::kMoving)
      throw std::runtime_error("a thread of the parent was moving this tensor at the fork");
    moved_.wait(lock, [&] { return saved.place_ != Place::kMoving; });
    want(saved, usage);
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

uint64_t Ledger::evict(uint64_t wanted_bytes, std::optional<c10::Device> only_from) noexcept {
  reap();
  try {
    {
      const Lock lock(mutex_);
      problem_.clear();
    }
    while (true) {
      Attempt attempt = evict_among(Candidates::kMeant, wanted_bytes, only_from);
      if (attempt.freed_bytes == 0 && attempt.has_failed) {
        // The host may be full. It gets room from copies that nobody wants; and what was copied needs no more of it.
        reap(/*waits_for_all=*/true);
        attempt = evict_among(Candidates::kMeant, wanted_bytes, only_from);
        if (attempt.freed_bytes == 0 && attempt.has_failed)
          attempt = evict_among(Candidates::kCopied, wanted_bytes, only_from);
      }
      if (attempt.freed_bytes > 0) return attempt.freed_bytes;
      if (!attempt.have_others_begun) return evict_among(Candidates::kAll, wanted_bytes, only_from).freed_bytes;
      if (const uint64_t freed_bytes = await_others(attempt); freed_bytes > 0) return freed_bytes;
    }
  } catch (const std::bad_alloc&) {
    return 0;  // no memory for the lists: nothing leaves
  }
}

void Ledger::look_for(Candidates which, std::optional<c10::Device> only_from, Choice& found) const {
  found.storages.reserve(by_age_.size());
  found.numbers.reserve(by_age_.size());
  for (const auto& [number, entry] : by_age_) {
    found.storages.push_back(entry.lock());
    const SavedStorage* const saved = found.storages.back().get();
    const bool is_meant = saved != nullptr && (!only_from || saved->device_ == *only_from);
    const bool is_free = is_meant && can_leave(*saved) && (which != Candidates::kMeant || !saved->stays_) &&
                         (which != Candidates::kCopied || saved->transit_.host);
    found.numbers.push_back({is_free ? saved->size_bytes_ : 0, UINT64_MAX - number});
  }
}

Ledger::Attempt Ledger::evict_among(Candidates which, uint64_t wanted_bytes, std::optional<c10::Device> only_from) {
  Choice choice;
  Attempt attempt;
  Lock lock(mutex_);
  if (!are_evictions_allowed_) return attempt;
  attempt.have_others_begun = leaving_ > 0;
  look_for(which, only_from, choice);
  for (const size_t index : policy::choose_evictions(choice.numbers, wanted_bytes)) {
    const auto& saved = choice.storages[index];
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

uint64_t Ledger::reclaim(c10::Device device, uint64_t wanted_bytes, bool is_first) noexcept {
  if (is_prefetching_) return 0;  // what is wanted later does not drive out what is wanted sooner
  const DeviceSide& side = side_of(device);
  const uint64_t limit_bytes = side.limit_bytes(device), held_bytes = side.held_bytes(device);
  const auto [used_bytes, flushes] = side.usage(device);
  const uint64_t room_bytes = limit_bytes - std::min(limit_bytes, held_bytes);
  const uint64_t least_bytes = room_bytes < wanted_bytes ? wanted_bytes - room_bytes : wanted_bytes;
  uint64_t short_bytes = least_bytes;
  if (side.has_pages()) {
    short_bytes += std::max(kSharedPageBytes, limit_bytes / kOnDemandPart);
  } else if (!is_first) {
    short_bytes = wanted_bytes;  // the first eviction freed no piece that is large enough
  }
  {
    const Lock lock(mutex_);
    if (!are_evictions_allowed_) return 0;
    ++statistics_.reclaims;
    rest_.fell_short();
    end_rest_if_over();
    Steps& steps = steps_[device.index()];
    steps.was_short = true;
    steps.has_flushed |= std::exchange(steps.flushes, flushes) != flushes && !steps.storages.empty();
    steps.follower.missed(demand_bytes(used_bytes + wanted_bytes));  // without what torch caches
    // What is held and not in use; in one piece also the room, if it would have been enough.
    const uint64_t used_here_bytes = used_bytes - std::min(used_bytes, side.elsewhere_bytes(device));
    const uint64_t free_bytes = side.has_pages()            ? held_bytes + kSharedPageBytes
                                : room_bytes < wanted_bytes ? held_bytes
                                                            : limit_bytes;
    const uint64_t useless_bytes = free_bytes - std::min(free_bytes, used_here_bytes);
    const uint64_t margin_bytes = steps.follower.margin_bytes();
    const uint64_t missing_bytes =
        useless_bytes > margin_bytes ? useless_bytes - margin_bytes : std::max(least_bytes, limit_bytes / kMarginPart);
    steps.follower.fell_short(missing_bytes, useless_bytes);
    steps.least_limit_bytes = std::min(steps.least_limit_bytes, limit_now(device, steps));
  }
  const uint64_t freed_bytes = evict(short_bytes, device);
  if (freed_bytes > 0) return freed_bytes;
  const uint64_t of_states_bytes = OptimizerStates::instance().make_room(short_bytes);
  if (of_states_bytes > 0) return of_states_bytes;
  return Weights::instance().make_room(side.number_of(device), short_bytes);
}

bool Ledger::has_room_ahead(c10::Device device, uint64_t wanted_bytes) noexcept {
  try {
    const DeviceSide& side = side_of(device);
    const uint64_t used_bytes = side.used_bytes(device), elsewhere_bytes = side.elsewhere_bytes(device);
    const Lock lock(mutex_);
    const uint64_t taken_bytes = used_bytes - std::min(used_bytes, elsewhere_bytes) + wanted_bytes;
    return taken_bytes + steps_[device.index()].follower.margin_bytes() <= side.limit_bytes(device);
  } catch (const std::exception&) {
    return true;  // torch's allocator will tell
  }
}

// What other threads have evicted since the attempt counts. 0: nothing, but what they began to copy may leave now.
uint64_t Ledger::await_others(const Attempt& attempt) {
  const GilReleased released;
  Lock lock(mutex_);
  moved_.wait(lock, [&] { return leaving_ == 0 || ever_evicted_bytes_ != attempt.ever_evicted_bytes; });
  return ever_evicted_bytes_ - attempt.ever_evicted_bytes;
}

Statistics Ledger::statistics() {
  reap();
  const Lock lock(mutex_);
  Statistics found = statistics_;
  for (const auto& [device, steps] : steps_) {
    found.plans_made += steps.follower.plans_made();
    found.margin_bytes = std::max(found.margin_bytes, steps.follower.margin_bytes());
  }
  return found;
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
