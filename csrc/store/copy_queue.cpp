#include "store/copy_queue.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace ebbtide {
namespace {

using Stage = Flight::Stage;
using Kind = CopyStep::Kind;

// As O_DIRECT asks for.
constexpr size_t kRingAlignment = 4 * kKiB;
// Direct pieces take no room in the ring. Large enough to keep the bus busy while a thread maps or unmaps a chunk.
constexpr size_t kDirectUnderWay = 4;

void cut_into_parts(Flight& flight, size_t part_bytes) {
  flight.part_bytes = part_bytes;
  flight.parts = (flight.piece.size_bytes + part_bytes - 1) / part_bytes;
}

}  // namespace

CopyQueue::CopyQueue(CopyDirection direction, const RingCut& cut, size_t events)
    : direction_(direction), cut_(cut), events_(events), room_(cut.ring_bytes) {
  const bool has_room = cut.piece_bytes > 0 && round_up(cut.piece_bytes, kRingAlignment) <= cut.ring_bytes;
  const auto is_part = [](size_t size_bytes) { return size_bytes > 0 && size_bytes % kRingAlignment == 0; };
  if (!has_room || !is_part(cut.part_bytes) || !is_part(cut.request_bytes) || events == 0)
    throw InvalidArgument("pieces of a copy have room in its ring, and parts of whole pages");
}

size_t CopyQueue::submit(const CopyJob& job) {
  const size_t piece_bytes = job.backup->direct() != nullptr ? kDirectPieceBytes : cut_.piece_bytes;
  const std::lock_guard lock(mutex_);
  const size_t number = jobs_.size();
  size_t count = 0;
  for (const CopyRange& range : job.ranges) {
    for (size_t done = 0; done < range.size_bytes; done += piece_bytes, ++count) {
      const size_t offset = range.offset + done;
      kernels::Digest* const digests = job.digests == nullptr ? nullptr : job.digests + offset / kernels::kBlockBytes;
      pieces_.push_back({number, job.device_address + offset, job.backup, job.offset + offset,
                         std::min(piece_bytes, range.size_bytes - done), digests, job.seed});
    }
  }
  jobs_.push_back({count, count, job.then});
  if (count == 0) {
    landed_jobs_.push_back(number);
    landed_.notify_one();
  } else {
    ++open_jobs_;
    changed_.notify_all();
  }
  return number;
}

void CopyQueue::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  changed_.notify_all();
  landed_.notify_one();
}

// In order: a piece without room blocks those behind it, so none starves.
void CopyQueue::begin_pieces_locked() {
  while (!pieces_.empty() && flights_.size() < events_ && try_begin_locked(pieces_.front())) pieces_.pop_front();
}

bool CopyQueue::try_begin_locked(const CopyPiece& piece) {
  Flight flight = {.piece = piece};
  if (piece.is_direct()) {
    if (direct_under_way_ >= kDirectUnderWay) return false;
    ++direct_under_way_;
    if (piece.digests != nullptr) cut_into_parts(flight, cut_.part_bytes);
  } else {
    const auto offset = room_.take(round_up(piece.size_bytes, kRingAlignment));
    if (!offset) return false;
    flight.ring_offset = *offset;
    cut_into_parts(flight, piece.backup->memory() != nullptr ? cut_.part_bytes : cut_.request_bytes);
    if (direction_ == CopyDirection::kToDevice) flight.stage = Stage::kParts;
  }
  flight.event = next_event_++ % events_;
  flights_.push_back(flight);
  return true;
}

// The bus first, then work, then waiting. The oldest piece first, since the others wait for its room.
CopyStep CopyQueue::find_step_locked(bool may_await_whole) {
  const auto find = [this](const auto& is_wanted) {
    const auto found = std::find_if(flights_.begin(), flights_.end(), is_wanted);
    return found == flights_.end() ? nullptr : &*found;
  };
  if (Flight* const flight = find([](const Flight& each) { return each.stage == Stage::kReady; })) {
    flight->stage = Stage::kLaunching;
    return {.kind = Kind::kLaunch, .flight = flight};
  }
  const auto has_part = [](const Flight& each) { return each.stage == Stage::kParts && each.parts_taken < each.parts; };
  if (Flight* const flight = find(has_part)) {
    const size_t offset = flight->parts_taken++ * flight->part_bytes;
    return {Kind::kPart, flight, offset, std::min(flight->part_bytes, flight->piece.size_bytes - offset)};
  }
  Flight* const on_bus = find([](const Flight& each) { return each.stage == Stage::kOnBus; });
  if (on_bus == nullptr || is_bus_awaited_ || (on_bus->parts == 0 && !may_await_whole)) return {};
  is_bus_awaited_ = true;
  return {.kind = Kind::kAwait, .flight = on_bus};
}

CopyStep CopyQueue::next(bool may_wait) {
  std::unique_lock lock(mutex_);
  while (failure_ == nullptr) {
    begin_pieces_locked();
    const CopyStep step = find_step_locked(may_wait || is_closed_ || !pieces_.empty());
    if (step.kind != Kind::kNothing) return step;
    if (is_closed_ && pieces_.empty() && flights_.empty()) break;
    if (!may_wait) return {};
    changed_.wait(lock);
  }
  return {.kind = Kind::kEnd};
}

const std::function<void()>* CopyQueue::queued(const Flight& flight) {
  const std::lock_guard lock(mutex_);
  Job& job = jobs_[flight.piece.job];
  return --job.pieces_unqueued == 0 && job.then ? &job.then : nullptr;
}

void CopyQueue::launched(Flight& flight) {
  const std::lock_guard lock(mutex_);
  flight.stage = Stage::kOnBus;
  changed_.notify_one();
}

void CopyQueue::part_done(Flight& flight) {
  const std::lock_guard lock(mutex_);
  if (++flight.parts_done < flight.parts) return;
  if (direction_ == CopyDirection::kToStore) return finish_locked(flight);
  flight.stage = Stage::kReady;  // the next step, by this thread or another
}

void CopyQueue::landed(Flight& flight) {
  const std::lock_guard lock(mutex_);
  is_bus_awaited_ = false;
  if (direction_ == CopyDirection::kToDevice || flight.parts == 0) return finish_locked(flight);
  flight.stage = Stage::kParts;
  changed_.notify_all();
}

void CopyQueue::finish_locked(Flight& flight) {
  const size_t job = flight.piece.job;
  flight.stage = Stage::kDone;
  direct_under_way_ -= flight.piece.is_direct() ? 1 : 0;
  while (!flights_.empty() && flights_.front().stage == Stage::kDone) {
    if (!flights_.front().piece.is_direct()) room_.give_back();
    flights_.pop_front();
  }
  changed_.notify_all();
  if (--jobs_[job].pieces_left != 0) return;
  --open_jobs_;
  landed_jobs_.push_back(job);
  landed_.notify_one();
}

void CopyQueue::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_ == nullptr) failure_ = std::move(error);
  changed_.notify_all();
  landed_.notify_one();
}

void CopyQueue::rethrow_failure() const {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

bool CopyQueue::is_on_bus(const Flight& flight) {
  return flight.stage == Stage::kLaunching || flight.stage == Stage::kOnBus;
}

bool CopyQueue::is_bus_used() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(flights_.begin(), flights_.end(), is_on_bus);
}

void CopyQueue::abandon_direct_backups() noexcept {
  const std::lock_guard lock(mutex_);
  for (const Flight& flight : flights_) {
    if (is_on_bus(flight) && flight.piece.is_direct()) flight.piece.backup->abandon();
  }
}

std::optional<size_t> CopyQueue::poll_landed() {
  const std::lock_guard lock(mutex_);
  if (landed_jobs_.empty()) return std::nullopt;
  const size_t job = landed_jobs_.front();
  landed_jobs_.pop_front();
  return job;
}

bool CopyQueue::is_over_locked() const { return failure_ != nullptr ? !has_threads_ : is_closed_ && open_jobs_ == 0; }

std::optional<size_t> CopyQueue::wait_landed() {
  std::unique_lock lock(mutex_);
  landed_.wait(lock, [&] { return !landed_jobs_.empty() || is_over_locked(); });
  if (landed_jobs_.empty()) return std::nullopt;
  const size_t job = landed_jobs_.front();
  landed_jobs_.pop_front();
  return job;
}

void CopyQueue::threads_started() {
  const std::lock_guard lock(mutex_);
  has_threads_ = true;
}

void CopyQueue::threads_ended() {
  const std::lock_guard lock(mutex_);
  has_threads_ = false;
  landed_.notify_one();
}

}  // namespace ebbtide
