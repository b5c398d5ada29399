#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ebbtide {

// The bytes of the character of UTF-8 at the beginning of text; 0 where it begins with no well-formed one.
size_t first_character_bytes(std::string_view text) noexcept;

// Well-formed UTF-8: no stray or missing continuation, no overlong form, no surrogate, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

// The first characters of text, at most max_bytes of them, never half a character.
std::string_view cut_utf8(std::string_view text, size_t max_bytes) noexcept;

// The character of well-formed UTF-8 that begins at offset at. Moves at to the next character.
char32_t next_character(std::string_view text, size_t& at);

// Without the spaces, tabs and line ends at both ends.
std::string_view trim_spaces(std::string_view text);

// 'text', for messages: at most 40 bytes of it, with control characters and invalid UTF-8 as \x1b.
std::string in_quotes(std::string_view text);

}  // namespace ebbtide
