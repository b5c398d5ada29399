// Memory on the host that takes gradients as soon as they are accumulated, step after step.
//
// Each parameter has a home for its gradient. A gradient gets its memory from torch, its bytes are copied home beside
// what the device does next, and then the storage takes the home in place of what it had. When the storage lets go of
// it, the parameter's next gradient can have it. Nothing is allocated, mapped or moved in steps to come.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "torch/lms/device_side.h"

namespace ebbtide::lms {

class GradientHomes {
 public:
  class Departure;

  static GradientHomes& instance();  // leaked: a gradient may die at any time

  // Begins to copy the gradient's bytes to the parameter's home; nullptr: that is not free. Nothing but the gradient
  // may know its memory. Throws what torch throws for a copy that fails.
  std::unique_ptr<Departure> depart(uint64_t owner, const at::Tensor& gradient);
  // The memory that the gradient has is the parameter's home from now on.
  void keep(uint64_t owner, const at::Tensor& gradient);
  // What is free is given back to torch, and what is lent as soon as it is free. Homes that are made from now on are
  // kept if `are_kept`. Call it without the GIL.
  void allow(bool are_kept);
  // A number that stands for a parameter, until it is gone: then its home is given back to torch. add_owner() throws
  // std::bad_alloc.
  uint64_t add_owner();
  void remove_owner(uint64_t owner) noexcept;
  // Whether parameters have gone, or homes were given back, since this was asked last.
  bool has_dropped() { return has_dropped_.exchange(false); }

 private:
  struct Home {
    c10::DataPtr memory;
    size_t size_bytes;
    c10::Stream stream;  // in whose order it is used
    uint64_t generation = 0;
    uint64_t owner = 0;
  };

  GradientHomes();
  static void give_back(void* home);
  std::unique_ptr<Home> find_free(uint64_t owner, size_t size_bytes, c10::Stream stream);
  static c10::DataPtr lend(std::unique_ptr<Home> home, void* address, c10::Device device);

  std::mutex mutex_;
  std::unordered_set<uint64_t> owners_;
  std::unordered_map<uint64_t, std::unique_ptr<Home>> free_;  // by owner
  uint64_t last_owner_ = 0;
  std::atomic<bool> has_dropped_{false};
  bool are_kept_ = false;
  uint64_t generation_ = 0;  // homes of an earlier one are given up
};

// A gradient on its way home. It has its own memory until move_home(), or for good.
class GradientHomes::Departure {
 public:
  Departure(std::unique_ptr<Home> home, const at::Tensor& gradient);
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;
  ~Departure();

  // Queues the copy, once.
  void begin();
  // What is queued from now on, in the current stream and in that of the gradient, comes after the copy. Returns the
  // gradient, or none where it is gone, or may have been written since.
  at::Tensor arrive();
  // After arrive(): the gradient has its home from now on. Again, nothing else may know its memory.
  void move_home(const at::Tensor& gradient);

 private:
  std::unique_ptr<Home> home_;
  c10::Storage memory_;  // until arrive()
  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> gradient_;
  const void* address_;
  uint32_t version_;
  TimeMark copied_{0};
};

}  // namespace ebbtide::lms
