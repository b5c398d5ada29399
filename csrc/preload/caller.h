#pragma once

#include <string_view>

namespace ebbtide::preload {

// The library with torch's allocator of device memory.
inline constexpr std::string_view kTorchAllocator = "libc10_cuda.so";

// Whether code of the library with this file name is on the stack of the current call. Walks the stack, so it is for
// rare cases only.
bool is_called_by(std::string_view library_file) noexcept;
// Whether torch's allocator makes the call itself: not through an allocator that was plugged into it, such as NCCL's.
bool is_called_by_torch() noexcept;

}  // namespace ebbtide::preload
