// How saved storages leave the device and come back: the ledger's moves.
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

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
#include "torch/lms/device_side.h"
#include "torch/lms/ledger.h"

namespace ebbtide::lms {

bool Ledger::can_leave(const SavedStorage& saved) const {
  if (saved.place_ != SavedStorage::Place::kDevice || saved.storage_.use_count() != 1) return false;
  std::atomic_thread_fence(std::memory_order_acquire);  // with the last release: what its last user wrote is there
  return saved.storage_.nbytes() == saved.size_bytes_ && saved.storage_.data() == saved.address_ &&
         !ebbtide_is_away(saved.address_, saved.size_bytes_);
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
    RECORD_USER_SCOPE("ebbtide::load");
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
    RECORD_USER_SCOPE("ebbtide::evict");
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
// the call and at the return, and not in between. False: it did not fit, or could not begin.
bool Ledger::begin_arrival(Lock& lock, SavedStorage& saved) noexcept {
  if (saved.place_ != SavedStorage::Place::kHost) return true;
  bool has_begun = true;
  ++arriving_;
  try {
    is_prefetching_ = true;
    load(lock, saved, side_of(saved.device_).current_stream(saved.device_), /*is_ahead=*/true);
  } catch (const std::exception&) {
    has_begun = false;  // it stays on the host
  }
  is_prefetching_ = false;
  --arriving_;
  moved_.notify_all();
  return has_begun;
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
  double hidden_seconds = 0, waited_seconds = 0, stream_waited_seconds = 0;
  Rate in, out;
  std::for_each(complete, transits.end(), [&](Transit& transit) {
    double seconds = 0, of_stream_seconds = 0;
    const auto begin = std::chrono::steady_clock::now();
    transit.copy.end(&seconds, &of_stream_seconds);
    stream_waited_seconds += of_stream_seconds;
    if (waits_for_all) {
      const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      transit.waited_seconds += waited;
      waited_seconds += waited;
    }
    hidden_seconds += std::max(0.0, seconds - transit.waited_seconds - of_stream_seconds);
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
    statistics_.stream_waited_seconds += stream_waited_seconds;
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

}  // namespace ebbtide::lms
