#include "torch/cpu/reclaim.h"

#include <array>
#include <atomic>

namespace ebbtide::cpu {
namespace {

// Atomics, not one struct: a reader that meets a change may see the new evict with the old explain, which is fine.
std::atomic<uint64_t (*)(uint64_t)> evict{nullptr};
std::atomic<void (*)(char*, size_t)> explain{nullptr};
std::atomic<bool (*)(size_t, c10::DataPtr*)> overflow{nullptr};
std::atomic<void (*)(size_t)> took{nullptr};

}  // namespace

void set_reclaimer(const Reclaimer& reclaimer) {
  evict.store(reclaimer.evict);
  explain.store(reclaimer.explain);
  overflow.store(reclaimer.overflow);
  took.store(reclaimer.took);
}

bool can_reclaim() { return evict.load() != nullptr; }

uint64_t reclaim(uint64_t wanted_bytes) {
  const auto function = evict.load();
  return function == nullptr ? 0 : function(wanted_bytes);
}

std::string explain_reclaim() {
  std::array<char, 1024> text{};
  const auto function = explain.load();
  if (function == nullptr) return "";
  function(text.data(), text.size());
  return text.data();
}

bool take_overflow(size_t size_bytes, c10::DataPtr* data) {
  const auto function = overflow.load();
  return function != nullptr && function(size_bytes, data);
}

void note_taken(size_t size_bytes) {
  if (const auto function = took.load(); function != nullptr) function(size_bytes);
}

}  // namespace ebbtide::cpu
