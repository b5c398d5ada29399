#include "torch/lms/gradient_homes.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <pthread.h>

#include <cstdint>
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

bool GradientHomes::take(uint64_t owner, const at::Tensor& gradient) {
  const c10::Storage& storage = gradient.storage();
  const DeviceSide& side = side_of(gradient.device());
  const c10::Stream stream = side.current_stream(gradient.device());
  std::unique_ptr<Home> home = find_free(owner, storage.nbytes(), stream);
  if (home == nullptr) return false;
  const Writing writing;  // so that no other thread moves it meanwhile
  try {
    const at::NoGradGuard no_grad;
    bytes_at(home->memory.get(), home->size_bytes, gradient.device())
        .copy_(bytes_at(storage.mutable_data(), home->size_bytes, gradient.device()), /*non_blocking=*/true);
  } catch (...) {
    give_back(home.release());
    throw;
  }
  void* const address = home->memory.get();
  c10::DataPtr former = storage.set_data_ptr(lend(std::move(home), address, gradient.device()));
  // The copy may still read it.
  side.let_go(c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(former), nullptr, false),
              stream);
  return true;
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

}  // namespace ebbtide::lms
