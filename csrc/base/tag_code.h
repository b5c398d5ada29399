#pragma once

#include <string>
#include <string_view>

// Any string as a tag, and back.
namespace ebbtide {

// A valid tag (base/tag.h). Different strings have different tags, but for a collision of 128-bit hashes among those
// that are too long.
//
// A tag without '%' stands for itself. "%" stands for the empty string. "%2A" stands for the byte 0x2A: of a character
// that a tag cannot hold, of invalid UTF-8, of a space at either end, and of '%' itself. What is too long then becomes
// "%~", the hash of the string, "~" and its encoded beginning.
std::string encode_tag(std::string_view text);

// Of a tag that was cut, the string that this process encoded; the tag itself where it encoded none.
std::string decode_tag(std::string_view tag);

}  // namespace ebbtide
