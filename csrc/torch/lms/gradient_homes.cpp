#include "torch/lms/gradient_homes.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>

#include <cstdint>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "torch/lms/device_side.h"
#include "torch/lms/weights.h"

namespace ebbtide::lms {
namespace {

GradientHomes* only_homes = nullptr;

// Bytes at an address that somebody else owns.
at::Tensor bytes_at(void* address, size_t size_bytes, c10::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), size_bytes, c10::DataPtr(address, device), nullptr, false);
  at::Tensor bytes = at::empty({0}, at::TensorOptions().device(device).dtype(at::kByte));
  bytes.set_(std::move(storage), 0, {static_cast<int64_t>(size_bytes)}, {1});
  return bytes;
}

class Writing {
 public:
  Writing() { Weights::instance().begin_use(this, UseKind::kWrite, {}, /*brings=*/false); }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;
  ~Writing() { Weights::instance().end_use(this, std::this_thread::get_id()); }
};

}  // namespace

GradientHomes& GradientHomes::instance() {
  static GradientHomes& homes = *new GradientHomes();
  return homes;
}

GradientHomes::GradientHomes() {
  only_homes = this;
  // A child never finds the lock held by a thread that it does not have.
  ::pthread_atfork([] { only_homes->mutex_.lock(); }, [] { only_homes->mutex_.unlock(); },
                   [] { only_homes->mutex_.unlock(); });
}

std::unique_ptr<GradientHomes::Home> GradientHomes::find_free(uint64_t owner, size_t size_bytes, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = free_.find(owner);
  if (found == free_.end() || found->second->size_bytes != size_bytes || found->second->stream != stream)
    return nullptr;
  std::unique_ptr<Home> home = std::move(found->second);
  free_.erase(found);
  return home;
}

std::unique_ptr<GradientHomes::Departure> GradientHomes::depart(uint64_t owner, const at::Tensor& gradient) {
  const c10::Stream stream = side_of(gradient.device()).current_stream(gradient.device());
  std::unique_ptr<Home> home = find_free(owner, gradient.storage().nbytes(), stream);
  if (home == nullptr) return nullptr;
  auto departure = std::make_unique<Departure>(std::move(home), gradient);
  departure->begin();
  return departure;
}

void GradientHomes::keep(uint64_t owner, const at::Tensor& gradient) {
  const c10::Storage& storage = gradient.storage();
  const c10::Stream stream = side_of(gradient.device()).current_stream(gradient.device());
  auto home = std::make_unique<Home>(Home{c10::DataPtr(), storage.nbytes(), stream, 0, owner});
  {
    const std::lock_guard lock(mutex_);
    home->generation = generation_;
  }
  Home& kept = *home;
  kept.memory = storage.set_data_ptr(lend(std::move(home), storage.mutable_data(), gradient.device()));
}

c10::DataPtr GradientHomes::lend(std::unique_ptr<Home> home, void* address, c10::Device device) {
  return {address, home.release(), &give_back, device};
}

void GradientHomes::give_back(void* home) {
  std::unique_ptr<Home> own(static_cast<Home*>(home));
  const std::lock_guard lock(only_homes->mutex_);
  if (only_homes->are_kept_ && own->generation == only_homes->generation_ && only_homes->owners_.contains(own->owner)) {
    try {
      only_homes->free_[own->owner].swap(own);  // the latest one fits the next gradient, if any does
    } catch (const std::bad_alloc&) {
      // It goes back to torch.
    }
  }
  if (own != nullptr) only_homes->has_dropped_.store(true);
}

void GradientHomes::allow(bool are_kept) {
  decltype(free_) dropped;
  const std::lock_guard lock(mutex_);
  are_kept_ = are_kept;
  ++generation_;
  dropped.swap(free_);
}

uint64_t GradientHomes::add_owner() {
  const std::lock_guard lock(mutex_);
  owners_.insert(++last_owner_);
  return last_owner_;
}

void GradientHomes::remove_owner(uint64_t owner) noexcept {
  std::unique_ptr<Home> dropped;
  const std::lock_guard lock(mutex_);
  owners_.erase(owner);
  has_dropped_.store(true);
  const auto found = free_.find(owner);
  if (found == free_.end()) return;
  dropped = std::move(found->second);
  free_.erase(found);
}

// --- Departure ---

GradientHomes::Departure::Departure(std::unique_ptr<Home> home, const at::Tensor& gradient)
    : home_(std::move(home)),
      memory_(gradient.storage()),
      gradient_(gradient.getIntrusivePtr()),
      address_(memory_.data()),
      version_(gradient._version()) {}

void GradientHomes::Departure::begin() {
  const c10::Device device = memory_.device();
  const DeviceSide& side = side_of(device);
  const c10::Stream beside = side.copying_stream(device);
  side.mark(device, 0).come_before(beside);
  const Writing writing;  // so that no other thread moves it meanwhile
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(beside);
  bytes_at(home_->memory.get(), home_->size_bytes, device)
      .copy_(bytes_at(memory_.mutable_data(), home_->size_bytes, device), /*non_blocking=*/true);
  copied_ = side.mark(device, 0);
}

GradientHomes::Departure::~Departure() {
  if (home_ == nullptr) return;
  try {
    if (memory_) arrive();
    give_back(home_.release());
  } catch (const std::exception&) {  // rather lost than used too early
    static_cast<void>(home_.release());
    static_cast<void>(new c10::Storage(std::move(memory_)));
  }
}

at::Tensor GradientHomes::Departure::arrive() {
  const c10::Device device = memory_.device();
  copied_.come_before(home_->stream);
  copied_.come_before(side_of(device).current_stream(device));
  at::Tensor gradient(gradient_.lock());
  const bool is_as_copied = gradient.defined() && gradient.has_storage() && gradient.storage().data() == address_ &&
                            gradient._version() == version_;
  side_of(device).let_go(std::exchange(memory_, c10::Storage()), home_->stream);
  return is_as_copied ? gradient : at::Tensor();
}

void GradientHomes::Departure::move_home(const at::Tensor& gradient) {
  const c10::Storage& storage = gradient.storage();
  const c10::Stream stream = home_->stream;
  void* const address = home_->memory.get();
  c10::DataPtr former = storage.set_data_ptr(lend(std::move(home_), address, gradient.device()));
  side_of(gradient.device())
      .let_go(c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(former), nullptr, false),
              stream);
}

}  // namespace ebbtide::lms
