#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ebbtide {

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;
inline constexpr uint64_t kGiB = 1024 * kMiB;
inline constexpr uint64_t kUnlimited = UINT64_MAX;

// multiple must not be 0. Saturates at the largest multiple instead of wrapping.
constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  const uint64_t rest = value % multiple;
  if (rest == 0) return value;
  const uint64_t down = value - rest;
  return down > UINT64_MAX - multiple ? UINT64_MAX - UINT64_MAX % multiple : down + multiple;
}

constexpr uint64_t saturating_add(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }
constexpr uint64_t saturating_subtract(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// "15.0 GiB", "512 MiB", "100 bytes", "no limit" for kUnlimited.
std::string format_bytes(uint64_t bytes);
// The same of an amount, of which the largest is no kUnlimited: "16 EiB".
std::string format_amount(uint64_t bytes);

// The fault of a text that should be a size: its form, its unit, a minus sign, or more than 2^63 - 1 bytes.
enum class SizeProblem { kNone, kForm, kUnit, kNegative, kTooLarge };
struct ParsedSize {
  SizeProblem problem = SizeProblem::kForm;
  uint64_t bytes = 0;
  std::string_view number, unit;  // of the text
};
// "17179869184", "16GiB" (binary), "16GB" (decimal), "1.5 mib", with spaces around; fractions of a byte are cut off.
ParsedSize parse_size(std::string_view text);

}  // namespace ebbtide
