// Large model support on a GPU, in whatever memory torch's caching allocator hands out. No header of CUDA is needed.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "torch/lms/device_side.h"

namespace ebbtide::lms {

DeviceSide& cuda_side();

// Which allocations are looked at, since torch's own limit does not hold them: none; those in which a flush may free
// memory of a tag that it was raised for; all, since there is none.
enum class Watch : int { kNone, kFlushes, kAll };

struct CudaHooks {
  // How many bytes an eviction freed.
  uint64_t (*reclaim)(c10::Device device, uint64_t wanted_bytes, bool is_first);
  // Memory for what finds no room, though nothing can leave any more; false: none.
  bool (*overflow)(size_t size_bytes, c10::DataPtr* data);
  // Fits the limits of torch and of ebbtide to what has moved. Whether torch may hold more than before.
  bool (*balance)() noexcept;
  // Gives back what torch caches; false: not now, or the limit is the device's own.
  bool (*give_back)() noexcept;
  // Why nothing more could leave; "" where that is unknown.
  std::string (*explain)();
};
// From now on an allocation that does not fit is tried again as long as the hooks find room for it. Throws
// std::runtime_error where torch's allocator can't be followed; nothing has changed then.
void follow_cuda_allocations(const CudaHooks& hooks);
void leave_cuda_allocations();
// The most device memory that torch and ebbtide may hold on a device.
void set_cuda_limit(int device, uint64_t limit_bytes);
// Of what torch's allocator holds there, how much is not on the device: tags' memory on the host, paused, or released
// by a trim since no tensor uses it. The latter, which is no part of any demand, is unused_bytes.
void set_cuda_away(int device, uint64_t away_bytes, uint64_t unused_bytes, Watch watch);

}  // namespace ebbtide::lms
