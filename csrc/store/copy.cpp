#include "store/copy.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "driver/context.h"
#include "store/aligned_bytes.h"

namespace ebbtide {
namespace {

// What the store can't show is read in parts of this size, to be compared while they are in the cache.
constexpr size_t kComparedBytes = kMiB;

}  // namespace

// One thread's share: a lane, and the pieces that are on the bus between the device and its slots.
class Copy::Worker {
 public:
  Worker(CopyEngine& engine, int index, const RingCut& cut, CopyQueue& queue, CopyDirection direction)
      : engine_(engine),
        lane_(engine.lane(index)),
        slots_(engine.staging().bytes() + static_cast<size_t>(index) * cut.bytes_per_thread()),
        cut_(cut),
        queue_(queue),
        direction_(direction) {}

  // Until the queue has nothing more.
  void work() noexcept {
    while (step(true)) {
    }
  }

  // Puts what can be on the bus there, and waits for the oldest. False when there was nothing to do. may_wait: for pieces, where none is under way.
  bool step(bool may_wait) noexcept {
    try {
      while (in_flight_.size() < lane_.events.size()) {
        const bool must_wait = may_wait && in_flight_.empty();
        const bool has_slot = staged_ < static_cast<size_t>(cut_.slots_per_thread);
        const std::optional<CopyPiece> piece = must_wait ? queue_.wait_take() : queue_.try_take(has_slot);
        if (!piece) break;
        launch(*piece);
      }
      if (in_flight_.empty()) return false;
      finish_oldest();
      return true;
    } catch (...) {
      queue_.fail(std::current_exception());
    }
    drain();
    return false;
  }

  // Where a failure elsewhere, or nobody's interest, left copies on the bus: nobody may reuse the slots or unmap the chunks before they have ended.
  void drain() noexcept {
    if (in_flight_.empty()) return;
    CUresult result = driver().cuStreamSynchronize(lane_.stream.get());
    if (result != CUDA_SUCCESS) result = driver().cuStreamSynchronize(lane_.stream.get());
    if (result != CUDA_SUCCESS) {
      engine_.poison();
      for (const Flight& flight : in_flight_) {
        if (flight.piece.is_direct()) flight.piece.backup->abandon();
      }
    }
    in_flight_.clear();
    staged_ = 0;
  }

 private:
  struct Flight {
    CopyPiece piece;
    std::byte* bytes;  // the slot's, or the store's own
    const Event* done;
  };

  void launch(const CopyPiece& piece) {
    const bool is_direct = piece.is_direct();
    std::byte* const bytes = is_direct ? piece.backup->direct() + piece.offset : slots_ + next_slot_ * cut_.slot_bytes;
    const Event& done = lane_.events[next_event_];
    if (direction_ == CopyDirection::kToStore) {
      check(driver().cuMemcpyDtoHAsync(bytes, piece.device_address, piece.size_bytes, lane_.stream.get()),
            "cuMemcpyDtoHAsync", "size=" + std::to_string(piece.size_bytes));
    } else {
      if (!is_direct) piece.backup->read(piece.offset, bytes, piece.size_bytes);
      check(driver().cuMemcpyHtoDAsync(piece.device_address, bytes, piece.size_bytes, lane_.stream.get()),
            "cuMemcpyHtoDAsync", "size=" + std::to_string(piece.size_bytes));
    }
    in_flight_.push_back({piece, bytes, &done});
    next_event_ = (next_event_ + 1) % lane_.events.size();
    if (!is_direct) {
      ++staged_;
      next_slot_ = (next_slot_ + 1) % static_cast<size_t>(cut_.slots_per_thread);
    }
    done.record(lane_.stream);
  }

  void finish_oldest() {
    const Flight flight = in_flight_.front();
    const CopyPiece& piece = flight.piece;
    flight.done->synchronize();
    in_flight_.pop_front();
    if (!piece.is_direct()) {
      --staged_;
      if (direction_ == CopyDirection::kToStore) keep(piece, flight.bytes);
    }
    queue_.complete(piece);
  }

  void keep(const CopyPiece& piece, const std::byte* bytes) {
    if (piece.must_compare && holds_already(piece, bytes)) return;
    piece.backup->write(piece.offset, bytes, piece.size_bytes);
  }

  bool holds_already(const CopyPiece& piece, const std::byte* bytes) {
    if (const std::byte* const stored = piece.backup->memory())
      return std::memcmp(stored + piece.offset, bytes, piece.size_bytes) == 0;
    if (!compared_) compared_.emplace(kComparedBytes);
    for (size_t done = 0; done < piece.size_bytes; done += kComparedBytes) {
      const size_t part_bytes = std::min(kComparedBytes, piece.size_bytes - done);
      piece.backup->read(piece.offset + done, compared_->get(), part_bytes);
      if (std::memcmp(compared_->get(), bytes + done, part_bytes) != 0) return false;
    }
    return true;
  }

  CopyEngine& engine_;
  CopyLane& lane_;
  std::byte* const slots_;
  const RingCut cut_;
  CopyQueue& queue_;
  const CopyDirection direction_;
  std::deque<Flight> in_flight_;
  size_t staged_ = 0;  // of those, through a slot
  size_t next_slot_ = 0;
  size_t next_event_ = 0;
  std::optional<AlignedBytes> compared_;  // made once it is wanted
};

Copy::Copy(CopyEngine& engine, CopyDirection direction, const RingCut& cut, bool must_have_threads)
    : engine_(engine), queue_(cut.slot_bytes) {
  for (int index = 0; index < cut.threads; ++index) {
    workers_.push_back(std::make_unique<Worker>(engine, index, cut, queue_, direction));
  }
  if (cut.threads > 1 || must_have_threads) start_threads(cut.threads);
}

void Copy::start_threads(int thread_count) {
  threads_.reserve(static_cast<size_t>(thread_count));
  for (int index = 0; index < thread_count; ++index) {
    queue_.thread_started();
    try {
      threads_.emplace_back([this, &worker = *workers_[static_cast<size_t>(index)]] {
        try {
          const ContextScope scope(engine_.device());
          worker.work();
          worker.drain();
        } catch (...) {
          queue_.fail(std::current_exception());
        }
        queue_.thread_ended();
      });
    } catch (...) {
      // The system starts no more threads: those that run share the work.
      queue_.thread_ended();
      return;
    }
  }
}

Copy::~Copy() {
  queue_.fail(std::make_exception_ptr(StateError("this copy was given up")));
  threads_.clear();
  for (const auto& worker : workers_) worker->drain();
}

std::optional<size_t> Copy::poll_landed() {
  if (threads_.empty()) workers_.front()->step(false);
  return queue_.poll_landed();
}

std::optional<size_t> Copy::finish_next() {
  queue_.close();
  if (threads_.empty()) {
    const ContextScope scope(engine_.device());
    while (true) {
      if (const auto job = queue_.poll_landed()) return job;
      if (!workers_.front()->step(false)) break;
    }
  }
  if (const auto job = queue_.wait_landed()) return job;
  queue_.rethrow_failure();
  return std::nullopt;
}

}  // namespace ebbtide
