#pragma once

#include <cstdint>

// Used by the torch extension as well: standard C++ only.
namespace ebbtide::policy {

// splitmix64's mixing function.
inline uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace ebbtide::policy
