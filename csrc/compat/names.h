#pragma once

#include "api/ebbtide.h"

// Tags of torch_memory_saver, which are any strings.
namespace ebbtide::compat {

// Fills tag. False, after a line on stderr, where name is null or memory is short.
bool encode(const char* call, const char* name, char (&tag)[EBBTIDE_TAG_MAX + 1]) noexcept;

// The name behind a tag. It lives as long as the process.
const char* decode(const char* tag) noexcept;

}  // namespace ebbtide::compat
