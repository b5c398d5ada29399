#include "torch/lms/overflow.h"

#include <cstring>

#include "api/ebbtide.h"
#include "torch/lms/ledger.h"

namespace ebbtide::lms {
namespace {

constexpr const char* kOverflowTag = "lms.overflow";  // csrc/torch/cpu/allocator.cpp

}  // namespace

Overflow& Overflow::instance() {
  static Overflow& overflow = *new Overflow();
  return overflow;
}

void* Overflow::take(int device, size_t size_bytes) noexcept {
  if (!is_allowed_.load() || Ledger::is_prefetching()) return nullptr;
  ebbtide_policy policy = EBBTIDE_POLICY_INIT;
  policy.overflow = EBBTIDE_OVERFLOW_SPLIT;
  void* address = nullptr;
  if (ebbtide_alloc(kOverflowTag, &policy, device, size_bytes, &address, nullptr) != EBBTIDE_OK) return nullptr;
  taken_bytes_.fetch_add(size_bytes);
  return address;
}

bool Overflow::has(const void* address) noexcept {
  bool is_found = false;
  ebbtide_allocation_info info{};
  return ebbtide_find(address, &is_found, &info, nullptr) == EBBTIDE_OK && is_found &&
         std::strcmp(info.tag, kOverflowTag) == 0;
}

}  // namespace ebbtide::lms
