#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ebbtide {

// Well-formed UTF-8: no stray or missing continuation, no overlong form, no surrogate, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

// The first characters of text, at most max_bytes of them, never half a character.
std::string cut_utf8(std::string_view text, size_t max_bytes);

}  // namespace ebbtide
