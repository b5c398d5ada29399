#include "base/text.h"

#include <cstdio>

namespace ebbtide {
namespace {

bool is_continuation(char character) { return (static_cast<unsigned char>(character) & 0xC0) == 0x80; }

// Bytes of the character that begins with lead; 0 where none does.
size_t character_bytes(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  if (lead >= 0xF0 && lead < 0xF5) return 4;
  return 0;
}

// The second byte's range is narrower after some leads: overlong forms, surrogates, beyond U+10FFFF.
bool is_second_allowed(unsigned char lead, unsigned char second) {
  switch (lead) {
    case 0xE0: return second >= 0xA0;
    case 0xED: return second < 0xA0;
    case 0xF0: return second >= 0x90;
    case 0xF4: return second < 0x90;
    default: return true;
  }
}

}  // namespace

size_t first_character_bytes(std::string_view text) noexcept {
  if (text.empty()) return 0;
  const auto lead = static_cast<unsigned char>(text.front());
  const size_t bytes = character_bytes(lead);
  if (bytes > text.size() || (bytes > 1 && !is_second_allowed(lead, static_cast<unsigned char>(text[1])))) return 0;
  for (size_t next = 1; next < bytes; ++next) {
    if (!is_continuation(text[next])) return 0;
  }
  return bytes;
}

bool is_utf8(std::string_view text) {
  while (const size_t bytes = first_character_bytes(text)) text.remove_prefix(bytes);
  return text.empty();
}

std::string_view cut_utf8(std::string_view text, size_t max_bytes) noexcept {
  if (text.size() <= max_bytes) return text;
  while (max_bytes > 0 && is_continuation(text[max_bytes])) --max_bytes;
  return text.substr(0, max_bytes);
}

char32_t next_character(std::string_view text, size_t& at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const size_t bytes = character_bytes(lead);
  char32_t character = bytes == 1 ? lead : lead & (0x7Fu >> bytes);
  for (size_t next = 1; next < bytes; ++next)
    character = character << 6 | (static_cast<unsigned char>(text[at + next]) & 0x3Fu);
  at += bytes;
  return character;
}

std::string_view trim_spaces(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\n\r\f\v";
  const size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return text.substr(text.size());
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxBytes = 40;
  const bool is_text = is_utf8(text);
  const std::string_view part = is_text ? cut_utf8(text, kMaxBytes) : text.substr(0, kMaxBytes);
  std::string shown = "'";
  for (const char character : part) {
    const auto byte = static_cast<unsigned char>(character);
    if (byte >= 0x20 && byte != 0x7F && (byte < 0x80 || is_text)) {
      shown += character;
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
    shown += escaped;
  }
  return shown + (part.size() < text.size() ? "...'" : "'");
}

}  // namespace ebbtide
