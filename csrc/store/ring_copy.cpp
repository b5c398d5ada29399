#include "store/ring_copy.h"

#include <string>

#include "base/error.h"
#include "driver/context.h"
#include "kernels/blocks.h"
#include "store/parallel.h"

namespace ebbtide {
namespace {

using Kind = CopyStep::Kind;

// Ends the threads of a copy that is destroyed. No call is left that would throw it, and making it takes no memory.
struct GivenUp {};

}  // namespace

// The work of one thread.
class RingCopy::Worker {
 public:
  Worker(CopyEngine& engine, CopyQueue& queue, CopyDirection direction)
      : engine_(engine), queue_(queue), direction_(direction) {}

  // Until the queue has nothing more.
  void work() noexcept {
    while (step(true) != Kind::kEnd) {
    }
  }

  // Does the next step and returns which one it was. may_wait: waits until there is a step.
  Kind step(bool may_wait) noexcept {
    try {
      const CopyStep step = queue_.next(may_wait);
      if (step.kind == Kind::kLaunch) launch(*step.flight);
      if (step.kind == Kind::kPart) move_part(step);
      if (step.kind == Kind::kAwait) await(*step.flight);
      if (step.kind == Kind::kEnd) drain();
      return step.kind;
    } catch (...) {
      queue_.fail(std::current_exception());
    }
    drain();
    return Kind::kEnd;
  }

  // A failure elsewhere, or a caller that stopped early, may leave copies on the bus. They must end before the ring is
  // reused or the chunks are unmapped.
  void drain() noexcept {
    if (queue_.is_bus_used() && !engine_.settle(engine_.stream())) queue_.abandon_direct_backups();
  }

 private:
  std::byte* bytes_of(const Flight& flight) const {
    return flight.piece.is_direct() ? flight.piece.backup->direct() + flight.piece.offset
                                    : engine_.staging().bytes() + flight.ring_offset;
  }

  void launch(Flight& flight) {
    const CopyPiece& piece = flight.piece;
    const CUstream stream = engine_.stream().get();
    const auto detail = [&] { return "size=" + std::to_string(piece.size_bytes); };
    if (direction_ == CopyDirection::kToStore) {
      check(driver().cuMemcpyDtoHAsync(bytes_of(flight), piece.device_address, piece.size_bytes, stream),
            "cuMemcpyDtoHAsync", detail());
    } else {
      check(driver().cuMemcpyHtoDAsync(piece.device_address, bytes_of(flight), piece.size_bytes, stream),
            "cuMemcpyHtoDAsync", detail());
    }
    if (const auto* then = queue_.queued(flight)) (*then)();
    // Another thread's copy may have been queued in between; then this waits for it too.
    engine_.landing(flight.event).record(engine_.stream());
    queue_.launched(flight);
  }

  void await(Flight& flight) {
    engine_.landing(flight.event).synchronize();
    queue_.landed(flight);
  }

  void move_part(const CopyStep& step) {
    const CopyPiece& piece = step.flight->piece;
    std::byte* const bytes = bytes_of(*step.flight) + step.offset;
    const size_t offset = piece.offset + step.offset;
    if (piece.digests != nullptr) digest(piece, step, bytes);
    if (piece.is_direct()) {
      // The bus has brought them to the store itself.
    } else if (direction_ == CopyDirection::kToDevice) {
      piece.backup->read(offset, bytes, step.size_bytes);
    } else {
      piece.backup->write(offset, bytes, step.size_bytes);
    }
    queue_.part_done(*step.flight);
  }

  static void digest(const CopyPiece& piece, const CopyStep& step, const std::byte* bytes) {
    for (size_t done = 0; done < step.size_bytes; done += kernels::kBlockBytes) {
      piece.digests[(step.offset + done) / kernels::kBlockBytes] =
          kernels::digest_block(bytes + done, piece.seed).digest;
    }
  }

  CopyEngine& engine_;
  CopyQueue& queue_;
  const CopyDirection direction_;
};

RingCopy::RingCopy(CopyEngine& engine, CopyDirection direction, const RingCut& cut, bool must_have_threads)
    : engine_(engine), queue_(direction, cut, engine.landing_count()) {
  if (cut.ring_bytes > engine.staging().size_bytes())
    throw InvalidArgument("a copy uses no more than the ring that there is");
  for (int index = 0; index < cut.threads; ++index) {
    workers_.push_back(std::make_unique<Worker>(engine, queue_, direction));
  }
  if (cut.threads > 1 || must_have_threads) start_threads(cut.threads);
}

void RingCopy::start_threads(int thread_count) {
  const auto work = [this, is_relaxed = RelaxedCaptureMode::is_on()](int number) noexcept {
    try {
      const ContextScope scope(engine_.device());
      std::optional<RelaxedCaptureMode> relaxed;
      if (is_relaxed) relaxed.emplace();
      workers_[static_cast<size_t>(number)]->work();
    } catch (...) {
      queue_.fail(std::current_exception());
    }
  };
  queue_.threads_started();
  try {
    runner_ = std::jthread([this, work, thread_count] {
      run_parallel(thread_count, work);
      queue_.threads_ended();
    });
  } catch (...) {
    queue_.threads_ended();  // the calls below do the work
  }
}

RingCopy::~RingCopy() {
  queue_.fail(std::make_exception_ptr(GivenUp{}));
  if (has_threads()) runner_.join();
  workers_.front()->drain();
}

std::optional<size_t> RingCopy::poll_landed() {
  if (!has_threads()) {
    Kind kind = Kind::kLaunch;
    while (kind == Kind::kLaunch || kind == Kind::kPart) kind = workers_.front()->step(false);
  }
  return queue_.poll_landed();
}

std::optional<size_t> RingCopy::finish_next() {
  queue_.close();
  if (!has_threads()) {
    const ContextScope scope(engine_.device());
    while (true) {
      if (const auto job = queue_.poll_landed()) return job;
      const Kind kind = workers_.front()->step(false);
      if (kind == Kind::kNothing || kind == Kind::kEnd) break;
    }
  }
  if (const auto job = queue_.wait_landed()) return job;
  queue_.rethrow_failure();
  return std::nullopt;
}

}  // namespace ebbtide
