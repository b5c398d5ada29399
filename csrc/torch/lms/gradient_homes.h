// Memory on the host that takes gradients as soon as they are accumulated, step after step.
//
// A gradient gets its memory from torch, and its bytes are copied to a home of that size in the order of the current
// stream; the storage takes the home in place of what it had. When the storage lets go of it, the next gradient of
// that size can have it. Nothing is allocated, mapped or moved in steps to come.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ebbtide::lms {

class GradientHomes {
 public:
  static GradientHomes& instance();  // leaked: a gradient may die at any time

  // Whether a free home took the gradient. Nothing but the gradient may know its memory. Throws what torch throws for a
  // copy that fails; then the gradient is as it was.
  bool take(const at::Tensor& gradient);
  // The memory that the gradient has is a home from now on.
  void keep(const at::Tensor& gradient);
  // false: homes are given back to torch as soon as they are free. Call it without the GIL.
  void allow(bool are_kept);

 private:
  struct Home {
    c10::DataPtr memory;
    size_t size_bytes;
    c10::Stream stream;  // in whose order it is used
  };

  GradientHomes();
  static void give_back(void* home);
  std::unique_ptr<Home> find_free(size_t size_bytes, c10::Stream stream);
  static c10::DataPtr lend(std::unique_ptr<Home> home, void* address, c10::Device device);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Home>> free_;
  bool are_kept_ = false;
};

}  // namespace ebbtide::lms
