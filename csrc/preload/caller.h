#pragma once

#include <string_view>

namespace ebbtide::preload {

// The library with torch's allocator of device memory.
inline constexpr std::string_view kTorchAllocator = "libc10_cuda.so";

// Whether code of a library whose file has this name is among those who wait for the current call. Walks the stack: for rare cases only.
bool is_called_by(std::string_view library_file) noexcept;

}  // namespace ebbtide::preload
