#pragma once

#include <cstddef>

namespace ebbtide {

// memcpy that bypasses the cache when writing, for bytes that this core will not read soon. Ranges must not overlap.
void copy_nontemporal(std::byte* to, const std::byte* from, size_t size_bytes) noexcept;

}  // namespace ebbtide
