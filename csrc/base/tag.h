#pragma once

#include <cstddef>
#include <string_view>

namespace ebbtide {

inline constexpr size_t kTagBytesMax = 255;

// The one rule for tags: 1 to 255 bytes of UTF-8 without '*' and '/', and without invisible characters: no control or
// format characters, no space other than the plain one, and no plain ones at the ends. So two tags that look the same
// are the same, except for letters of different scripts. Throws InvalidArgument.
void check_tag_name(std::string_view name);

// Whether the character may stand in a tag; a plain space may not stand at its ends.
bool is_tag_character(char32_t character) noexcept;

}  // namespace ebbtide
