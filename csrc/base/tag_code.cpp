#include "base/tag_code.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "base/growing_list.h"
#include "base/tag.h"
#include "base/text.h"

namespace ebbtide {
namespace {

constexpr char kEscape = '%';
constexpr std::string_view kCutMark = "%~";

struct CutTag {
  std::string tag, text;
};
constinit GrowingList<CutTag> cut_tags;

const CutTag* find_cut(std::string_view tag) noexcept {
  return cut_tags.find([&](const CutTag& each) { return each.tag == tag; });
}

void append_hex(std::string& to, uint64_t value, int digit_count) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  while (digit_count-- > 0) to += kDigits[(value >> (4 * digit_count)) & 0xF];
}

bool is_plain(std::string_view character, bool is_at_end) {
  size_t at = 0;
  const char32_t code = next_character(character, at);
  return code != static_cast<char32_t>(kEscape) && is_tag_character(code) && !(code == U' ' && is_at_end);
}

// Takes the first character off the text, and returns its code.
std::string take_code(std::string_view& text, bool is_first) {
  const size_t size = first_character_bytes(text);
  const std::string_view taken = text.substr(0, std::max<size_t>(size, 1));
  text.remove_prefix(taken.size());
  if (size > 0 && is_plain(taken, is_first || text.empty())) return std::string(taken);
  std::string code;
  for (const char byte : taken) {
    code += kEscape;
    append_hex(code, static_cast<unsigned char>(byte), 2);
  }
  return code;
}

// FNV-1a of 128 bits.
std::string hash_of(std::string_view text) {
  unsigned __int128 hash = (static_cast<unsigned __int128>(0x6C62272E07BB0142) << 64) | 0x62B821756295C58D;
  constexpr unsigned __int128 kPrime = (static_cast<unsigned __int128>(1) << 88) | 0x13B;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * kPrime;
  std::string hex;
  append_hex(hex, static_cast<uint64_t>(hash >> 64), 16);
  append_hex(hex, static_cast<uint64_t>(hash), 16);
  return hex;
}

std::string cut(std::string_view text) {
  std::string tag = std::string(kCutMark) + hash_of(text) + "~";
  for (std::string_view rest = text; !rest.empty();) {
    const std::string code = take_code(rest, rest.size() == text.size());
    if (tag.size() + code.size() > kTagBytesMax) break;
    tag += code;
  }
  tag.erase(tag.find_last_not_of(' ') + 1);
  if (find_cut(tag) == nullptr) cut_tags.add({tag, std::string(text)});
  return tag;
}

// The byte of "%2A"; -1 where the text begins with no such code.
int read_escape(std::string_view text) {
  int byte = -1;
  if (text.size() < 3 || text[0] != kEscape) return -1;
  const auto [end, error] = std::from_chars(text.data() + 1, text.data() + 3, byte, 16);
  return error == std::errc() && end == text.data() + 3 ? byte : -1;
}

}  // namespace

std::string encode_tag(std::string_view text) {
  if (text.empty()) return {kEscape};
  std::string tag;
  for (std::string_view rest = text; !rest.empty() && tag.size() <= kTagBytesMax;) {
    tag += take_code(rest, rest.size() == text.size());
  }
  return tag.size() <= kTagBytesMax ? tag : cut(text);
}

std::string decode_tag(std::string_view tag) {
  if (tag == std::string_view(&kEscape, 1)) return "";
  if (tag.starts_with(kCutMark)) {
    const CutTag* const entry = find_cut(tag);
    return entry == nullptr ? std::string(tag) : entry->text;
  }
  std::string text;
  while (!tag.empty()) {
    const int byte = read_escape(tag);
    text += byte < 0 ? tag.front() : static_cast<char>(byte);
    tag.remove_prefix(byte < 0 ? 1 : 3);
  }
  return text;
}

}  // namespace ebbtide
