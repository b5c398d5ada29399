#include "base/bytes.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/text.h"

namespace ebbtide {

std::string format_amount(uint64_t bytes) { return format_bytes(std::min(bytes, kUnlimited - 1)); }

std::string format_bytes(uint64_t bytes) {
  if (bytes == kUnlimited) return "no limit";
  if (bytes < kKiB) return std::to_string(bytes) + " bytes";
  constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  double value = static_cast<double>(bytes) / 1024.0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  char text[48];
  const bool is_whole = value == static_cast<double>(static_cast<uint64_t>(value));
  std::snprintf(text, sizeof text, is_whole ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

namespace {

using Wide = unsigned __int128;

constexpr uint64_t kLargest = INT64_MAX;
constexpr size_t kFractionDigits = 18;  // more could not change a whole byte of 2^40

bool is_digit(char character) { return character >= '0' && character <= '9'; }
bool is_letter(char character) {
  return (character >= 'a' && character <= 'z') || (character >= 'A' && character <= 'Z');
}

// 0 for a unit that there is not.
uint64_t unit_bytes(std::string_view text) {
  std::string unit(text);
  for (char& letter : unit) letter = static_cast<char>(letter | 0x20);
  if (unit.empty() || unit == "b") return 1;
  const size_t power = std::string_view("kmgt").find(unit.front());
  const bool is_binary = unit.substr(1) == "ib";
  if (power == std::string_view::npos || (!is_binary && unit.substr(1) != "b")) return 0;
  uint64_t bytes = 1;
  for (size_t step = 0; step <= power; ++step) bytes *= is_binary ? kKiB : 1000;
  return bytes;
}

std::string_view take_while(std::string_view& text, bool (*is_wanted)(char)) {
  size_t length = 0;
  while (length < text.size() && is_wanted(text[length])) ++length;
  const std::string_view taken = text.substr(0, length);
  text.remove_prefix(length);
  return taken;
}

}  // namespace

ParsedSize parse_size(std::string_view text) {
  ParsedSize parsed;
  std::string_view rest = trim_spaces(text);
  const bool is_negative = !rest.empty() && rest.front() == '-';
  if (is_negative) rest.remove_prefix(1);
  const char* const begin = rest.data();
  const std::string_view whole = take_while(rest, is_digit);
  std::string_view fraction;
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    fraction = take_while(rest, is_digit);
    if (fraction.empty()) return parsed;
  }
  parsed.number = {begin, static_cast<size_t>(rest.data() - begin)};
  rest = trim_spaces(rest);
  parsed.unit = take_while(rest, is_letter);
  if (whole.empty() || !rest.empty()) return parsed;
  const uint64_t factor = unit_bytes(parsed.unit);
  parsed.problem = factor == 0 ? SizeProblem::kUnit : is_negative ? SizeProblem::kNegative : SizeProblem::kTooLarge;
  if (parsed.problem != SizeProblem::kTooLarge) return parsed;
  Wide bytes = 0;
  for (const char digit : whole) {
    bytes = bytes * 10 + static_cast<unsigned>(digit - '0');
    if (bytes > kLargest) return parsed;
  }
  Wide parts = 0;
  Wide scale = 1;
  for (const char digit : fraction.substr(0, kFractionDigits)) {
    parts = parts * 10 + static_cast<unsigned>(digit - '0');
    scale *= 10;
  }
  bytes = bytes * factor + parts * factor / scale;
  if (bytes > kLargest) return parsed;
  parsed.problem = SizeProblem::kNone;
  parsed.bytes = static_cast<uint64_t>(bytes);
  return parsed;
}

}  // namespace ebbtide
