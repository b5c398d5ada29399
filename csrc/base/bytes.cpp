#include "base/bytes.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>

namespace ebbtide {

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

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::optional<uint64_t> unit_bytes(std::string unit) {
  for (char& letter : unit) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  if (unit.empty() || unit == "b") return 1;
  const size_t power = std::string_view("kmgt").find(unit.front());
  const bool is_binary = unit.substr(1) == "ib";
  if (power == std::string_view::npos || (!is_binary && unit.substr(1) != "b")) return std::nullopt;
  uint64_t bytes = 1;
  for (size_t step = 0; step <= power; ++step) bytes *= is_binary ? 1024 : 1000;
  return bytes;
}

}  // namespace

std::optional<uint64_t> parse_bytes(std::string_view text) {
  text = trim(text);
  const size_t digits = text.find_first_not_of("0123456789.");
  const std::string number(text.substr(0, digits));
  const auto unit = unit_bytes(std::string(digits == std::string_view::npos ? "" : trim(text.substr(digits))));
  long double value = 0;
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), value, std::chars_format::fixed);
  if (!unit || number.empty() || error != std::errc() || end != number.data() + number.size()) return std::nullopt;
  value *= static_cast<long double>(*unit);
  if (value > 9223372036854775807.0L) return std::nullopt;
  return static_cast<uint64_t>(value);
}

}  // namespace ebbtide
