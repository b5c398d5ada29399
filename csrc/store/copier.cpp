#include "store/copier.h"

#include <deque>
#include <optional>
#include <string>
#include <thread>

#include "driver/context.h"
#include "driver/stream.h"
#include "store/copy_progress.h"

namespace ebbtide {

class Copier::Shared {
 public:
  Shared(CopyDirection direction, std::span<const CopyJob> jobs, size_t slot_bytes,
         const std::function<void(size_t)>& landed)
      : direction(direction), jobs(jobs), progress(jobs, slot_bytes), landed(landed) {}
  const CopyDirection direction;
  const std::span<const CopyJob> jobs;
  CopyProgress progress;
  const std::function<void(size_t)>& landed;
};

// One thread's share: a stream, its slots, and the pieces that are on the bus between them.
class Copier::Worker {
 public:
  Worker(Staging& staging, int first_slot, int slot_count) : staging_(staging), stream_(Stream::create()) {
    for (int index = first_slot; index < first_slot + slot_count; ++index) {
      slots_.push_back({staging.slot(index), Event::create()});
    }
  }

  // announce: called after each piece where the worker runs in the calling thread.
  void work(Shared& shared, const std::function<void()>& announce) noexcept {
    try {
      move_pieces(shared, announce);
    } catch (...) {
      shared.progress.fail(std::current_exception());
    }
    drain();
  }

 private:
  struct Slot {
    std::byte* bytes;
    Event done;
  };
  struct Flight {
    Slot* slot;
    Piece piece;
  };

  void move_pieces(Shared& shared, const std::function<void()>& announce) {
    size_t next_slot = 0;
    while (true) {
      while (in_flight_.size() < slots_.size()) {
        const std::optional<Piece> piece = shared.progress.take();
        if (!piece) break;
        Slot& slot = slots_[next_slot];
        next_slot = (next_slot + 1) % slots_.size();
        launch(shared, slot, *piece);
      }
      if (in_flight_.empty()) return;
      finish_oldest(shared);
      announce();
    }
  }

  void launch(Shared& shared, Slot& slot, const Piece& piece) {
    const CopyJob& job = shared.jobs[piece.job];
    const CUdeviceptr device_address = job.device_address + piece.offset;
    const std::string arguments = "size=" + std::to_string(piece.size_bytes);
    if (shared.direction == CopyDirection::kToStore) {
      check(driver().cuMemcpyDtoHAsync(slot.bytes, device_address, piece.size_bytes, stream_.get()),
            "cuMemcpyDtoHAsync", arguments);
    } else {
      job.backup->read(job.offset + piece.offset, slot.bytes, piece.size_bytes);
      check(driver().cuMemcpyHtoDAsync(device_address, slot.bytes, piece.size_bytes, stream_.get()),
            "cuMemcpyHtoDAsync", arguments);
    }
    in_flight_.push_back({&slot, piece});
    slot.done.record(stream_);
  }

  void finish_oldest(Shared& shared) {
    const Flight flight = in_flight_.front();
    flight.slot->done.synchronize();
    in_flight_.pop_front();
    if (shared.direction == CopyDirection::kToStore) {
      const CopyJob& job = shared.jobs[flight.piece.job];
      job.backup->write(job.offset + flight.piece.offset, flight.slot->bytes, flight.piece.size_bytes);
    }
    shared.progress.complete(flight.piece);
  }

  // After a failure copies may still be on the bus; nobody may reuse the slots or unmap the chunks before they have ended.
  void drain() noexcept {
    if (in_flight_.empty()) return;
    in_flight_.clear();
    CUresult result = driver().cuStreamSynchronize(stream_.get());
    if (result != CUDA_SUCCESS) result = driver().cuStreamSynchronize(stream_.get());
    if (result != CUDA_SUCCESS) staging_.poison();
  }

  Staging& staging_;
  Stream stream_;
  std::vector<Slot> slots_;
  std::deque<Flight> in_flight_;
};

Copier::Copier(int device, Staging& staging, int thread_count) : device_(device), staging_(staging) {
  const ContextScope scope(device);
  const int slots_each = staging.slot_count() / thread_count;
  for (int index = 0; index < thread_count; ++index) {
    workers_.push_back(std::make_unique<Worker>(staging, index * slots_each, slots_each));
  }
}

Copier::~Copier() = default;

void Copier::run(CopyDirection direction, std::span<const CopyJob> jobs, const std::function<void(size_t)>& landed) {
  const ContextScope scope(device_);
  Shared shared(direction, jobs, staging_.slot_bytes(), landed);
  if (workers_.size() == 1) {
    workers_.front()->work(shared, [&] {
      while (const std::optional<size_t> job = shared.progress.poll_landed()) landed(*job);
    });
  } else {
    run_threads(shared);
  }
  shared.progress.rethrow_failure();
}

void Copier::run_threads(Shared& shared) {
  const auto body = [&](Worker& worker) {
    try {
      const ContextScope scope(device_);
      worker.work(shared, [] {});
    } catch (...) {
      shared.progress.fail(std::current_exception());
    }
    shared.progress.thread_ended();
  };
  std::vector<std::jthread> threads;
  threads.reserve(workers_.size());
  for (const auto& worker : workers_) {
    try {
      threads.emplace_back(body, std::ref(*worker));
    } catch (...) {
      // The system starts no more threads: the ones that run share the work; with none, this thread does it.
      if (threads.empty()) body(*worker);
      break;
    }
  }
  const int thread_count = threads.empty() ? 1 : static_cast<int>(threads.size());
  while (const std::optional<size_t> job = shared.progress.wait_landed(thread_count)) {
    try {
      shared.landed(*job);
    } catch (...) {
      shared.progress.fail(std::current_exception());
      break;
    }
  }
}

}  // namespace ebbtide
