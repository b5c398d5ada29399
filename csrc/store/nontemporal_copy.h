#pragma once

#include <cstddef>

namespace ebbtide {

// memcpy that does not fill the cache with what is written: for bytes that nobody on this core reads soon. Ranges must not overlap.
void copy_nontemporal(std::byte* to, const std::byte* from, size_t size_bytes) noexcept;

}  // namespace ebbtide
