#include "store/delivery.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "driver/context.h"
#include "store/parallel.h"

namespace ebbtide {
namespace {

using kernels::kLanes;
using kernels::kMaxLaneSlots;
using kernels::kPieceUnit;

// Larger slots leave the cache between the thread that fills them and the bus.
constexpr size_t kLargestSlotBytes = 2 * kMiB;
constexpr size_t kLargestSlotBytesWithFiles = 4 * kMiB;  // a request each
constexpr size_t kLeastLaneSlots = 2;                    // one is filled while the other is read

constexpr std::chrono::microseconds kPollInterval{20};
// After this long without a piece, the driver is asked whether the kernel still runs.
constexpr std::chrono::milliseconds kStall{10};

uint32_t lane_of(size_t index) { return static_cast<uint32_t>(index % kLanes); }
// Which of its lane's pieces, counted from 1.
uint32_t number_of(size_t index) { return static_cast<uint32_t>(index / kLanes + 1); }
// How many of the first so many pieces are the lane's.
uint32_t share_of(size_t count, uint32_t lane) { return static_cast<uint32_t>((count + kLanes - 1 - lane) / kLanes); }

}  // namespace

bool Delivery::is_possible(int device) {
  return device_attribute(device, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0 &&
         device_attribute(device, CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT) == 0 && DeviceKernels::of(device) != nullptr;
}

Delivery::~Delivery() {
  cancel();
  if (threads_.joinable()) threads_.join();
}

size_t Delivery::slot_bytes() const {
  size_t bytes = has_files_ ? kLargestSlotBytesWithFiles : kLargestSlotBytes;
  while (bytes > kPieceUnit && bytes * kLanes * kLeastLaneSlots > engine_.staging().size_bytes()) bytes /= 2;
  return bytes;
}

uint32_t Delivery::lane_slots() const {
  return static_cast<uint32_t>(
      std::clamp<size_t>(engine_.staging().size_bytes() / (slot_bytes() * kLanes), 1, kMaxLaneSlots));
}

void Delivery::reserve(size_t size_bytes) {
  const size_t count = size_bytes / slot_bytes();
  pieces_.reserve(count);
  sources_.reserve(count);
}

void Delivery::add_copy(CUdeviceptr target, Backup& backup, size_t offset, size_t size_bytes) {
  const std::byte* const direct = backup.direct();
  for (size_t done = 0; done < size_bytes; done += slot_bytes()) {
    const size_t piece_bytes = std::min(slot_bytes(), size_bytes - done);
    const uint64_t source = direct == nullptr ? kernels::kFromSlot : reinterpret_cast<uint64_t>(direct + offset + done);
    pieces_.push_back({.target = target + done, .source = source, .size_bytes = piece_bytes});
    sources_.push_back({&backup, offset + done});
    staged_bytes_ += direct == nullptr ? piece_bytes : 0;
  }
}

void Delivery::add_value(CUdeviceptr target, kernels::Value value, size_t size_bytes) {
  pieces_.push_back({.target = target, .source = kernels::kFromValue, .size_bytes = size_bytes, .value = value});
  sources_.push_back({nullptr, 0});
}

void Delivery::prepare(std::byte* table, int threads) {
  board_ = std::make_unique<DeliveryBoard>(engine_.device());
  table_ = table;
  std::memcpy(table_, pieces_.data(), table_bytes());
  if (staged_bytes_ > 0) start_threads(threads);
}

// If launches wait for their kernels (CUDA_LAUNCH_BLOCKING), the threads have begun already.
void Delivery::launch(const DeviceKernels& kernels) {
  kernels.deliver(engine_.side_stream().get(), reinterpret_cast<const kernels::Piece*>(table_),
                  engine_.staging().bytes(), board_->words(), slot_bytes(), lane_slots(),
                  static_cast<uint32_t>(pieces_.size()));
}

void Delivery::start_threads(int threads) {
  try {
    threads_ = std::jthread([this, threads] { run_parallel(threads, [this](int) noexcept { feed(); }); });
  } catch (const std::system_error&) {
    throw StateError("the system starts no thread for a resume in the background");
  }
}

// Each thread takes the next piece of all, so a thread is always working on the piece that the kernel waits for.
void Delivery::feed() noexcept {
  try {
    for (size_t index = next_++; index < pieces_.size() && !is_given_up_.load(); index = next_++) {
      if (pieces_[index].source == kernels::kFromSlot) fill_slot(index);
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

void Delivery::fill_slot(size_t index) {
  const uint32_t lane = lane_of(index);
  const uint32_t number = number_of(index);
  if (!await_slot(lane, number)) return;
  const uint32_t slot = (number - 1) % lane_slots();
  sources_[index].backup->read(sources_[index].offset,
                               engine_.staging().bytes() + slot_bytes() * (lane * lane_slots() + slot),
                               pieces_[index].size_bytes);
  board_->fill(lane, slot, number);
}

// Waits until the piece in the slot is in place. False: the delivery is cancelled.
bool Delivery::await_slot(uint32_t lane, uint32_t number) const {
  while (number > board_->done(lane) + lane_slots()) {
    if (is_given_up_.load()) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

void Delivery::cancel() noexcept {
  is_given_up_.store(true);
  if (board_ != nullptr) board_->cancel();
}

void Delivery::fail(std::exception_ptr error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr) failure_ = std::move(error);
  }
  has_failed_.store(true);
  cancel();
}

size_t Delivery::arrived() const {
  size_t first_missing = pieces_.size();
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    first_missing = std::min<size_t>(first_missing, size_t{board_->done(lane)} * kLanes + lane);
  }
  return first_missing;
}

void Delivery::wait_for(size_t count) {
  auto last_progress = std::chrono::steady_clock::now();
  size_t seen = arrived();
  for (size_t now_there = seen; now_there < count && !has_failed_.load(); now_there = arrived()) {
    const auto now = std::chrono::steady_clock::now();
    if (now_there != seen) {
      seen = now_there;
      last_progress = now;
    } else if (now - last_progress > kStall) {
      last_progress = now;
      ask_driver(count);
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

void Delivery::ask_driver(size_t count) noexcept {
  try {
    const ContextScope scope(engine_.device());
    const RelaxedCaptureMode relaxed;
    const CUresult result = driver().cuStreamQuery(engine_.side_stream().get());
    if (result == CUDA_ERROR_NOT_READY || result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) return;
    check(result, "cuStreamQuery");
    if (arrived() < count) throw StateError("this resume was given up");
  } catch (...) {
    fail(std::current_exception());
  }
}

void Delivery::finish() {
  if (!has_ended_) {
    wait_for(pieces_.size());
    if (threads_.joinable()) threads_.join();
    drain();
    has_ended_ = true;
  }
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

// Waits until the kernel has ended, or the device has failed.
void Delivery::drain() noexcept {
  std::exception_ptr error = try_synchronize();
  if (error != nullptr) error = try_synchronize();
  if (error == nullptr) return;
  engine_.poison();
  board_->abandon();
  for (size_t index = 0; index < pieces_.size(); ++index) {
    if (pieces_[index].source > kernels::kFromValue) sources_[index].backup->abandon();
  }
  fail(error);
}

std::exception_ptr Delivery::try_synchronize() noexcept {
  try {
    const ContextScope scope(engine_.device());
    const RelaxedCaptureMode relaxed;
    engine_.side_stream().synchronize();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void Delivery::stream_wait(CUstream stream, size_t count) const {
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t wanted = share_of(count, lane);
    if (board_->done(lane) >= wanted) continue;
    check(driver().cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(board_->gate(lane)),
                                       board_->gate_value(lane, wanted), CU_STREAM_WAIT_VALUE_GEQ),
          "cuStreamWaitValue32");
  }
}

}  // namespace ebbtide
