#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "api/ebbtide.h"

// The boundary where exceptions become codes. Every function of ebbtide.h that can fail runs its body inside guarded().
namespace ebbtide::api {

// The size of ebbtide_error in the first version of ebbtide.h. A smaller one is left as it is.
inline constexpr size_t kLeastError = offsetof(ebbtide_error, message) + sizeof(ebbtide_error::message);

void clear(ebbtide_error* error) noexcept;
// Called inside a catch block. Fills *error, if given, from the exception in flight.
ebbtide_status translate_exception(ebbtide_error* error) noexcept;

// Runs body, fills *error if given, and returns its status. Never throws. A template, so that body is not copied to the
// heap outside the try.
template <typename Body>
ebbtide_status guarded(ebbtide_error* error, Body&& body) noexcept {
  clear(error);
  try {
    std::forward<Body>(body)();
    return EBBTIDE_OK;
  } catch (...) {
    return translate_exception(error);
  }
}

// Throw InvalidArgument.
void require(bool condition, const char* message);
// Structs that begin with struct_size grow at their end. least is the size in the first version that had the struct.
// Callers compiled against an older header continue to work: fields that they lack are neither read nor written.
void require_size(size_t given, size_t least, const char* name);

template <typename Struct>
void write_struct(Struct* to, const Struct& filled, size_t least, const char* name) {
  const size_t given = to->struct_size;
  require_size(given, least, name);
  std::memcpy(static_cast<void*>(to), &filled, std::min(given, sizeof(Struct)));
  to->struct_size = given;
}

// defaults: the values of fields that the caller's version lacks.
template <typename Struct>
Struct read_struct(const Struct* from, const Struct& defaults, size_t least, const char* name) {
  require_size(from->struct_size, least, name);
  Struct read = defaults;
  std::memcpy(static_cast<void*>(&read), from, std::min(from->struct_size, sizeof(Struct)));
  return read;
}

// Fixed-size text fields: cuts, always ends with NUL, never cuts inside a UTF-8 character.
void copy_text(char* to, size_t capacity, const char* from) noexcept;

}  // namespace ebbtide::api
