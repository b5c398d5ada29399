#include "sim/quirks.h"

#include <atomic>
#include <string>

#include "base/settings.h"

namespace ebbtide::sim {
namespace {

constexpr const char* kWords[] = {"held", "stale", "late", "handles", "host"};  // as the quirks are numbered

std::atomic<unsigned>& switched_on() {
  static std::atomic<unsigned> bits{0};
  return bits;
}

}  // namespace

bool has(Quirk quirk) noexcept { return (switched_on() >> static_cast<unsigned>(quirk) & 1) != 0; }

void read_quirks() noexcept {
  const std::string word = read_variable(Setting::kSimQuirks).value_or("none");
  unsigned bits = 0;
  for (unsigned number = 0; number < std::size(kWords); ++number) {
    if (word == kWords[number] || word == "all") bits |= 1u << number;
  }
  switched_on() = bits;
}

}  // namespace ebbtide::sim
