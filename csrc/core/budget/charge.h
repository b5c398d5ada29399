#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "base/bytes.h"

// The common part of the budgets of device, host and pinned memory.
namespace ebbtide {

// Owns a part of a budget, and gives it back when it goes. A Part adds up, and says its size in bytes.
template <typename Budget, typename Part>
class Charge {
 public:
  Charge() = default;
  Charge(Budget& budget, Part part) : budget_(&budget), part_(part) {}
  Charge(Charge&& other) noexcept { merge(std::move(other)); }
  Charge& operator=(Charge&& other) noexcept {
    if (this == &other) return *this;
    reset();
    merge(std::move(other));
    return *this;
  }
  ~Charge() { reset(); }
  void reset() noexcept {
    if (budget_ != nullptr) budget_->give_back(part_);
    budget_ = nullptr;
    part_ = {};
  }
  void merge(Charge&& other) noexcept {  // of the same budget
    if (other.budget_ == nullptr) return;
    budget_ = std::exchange(other.budget_, nullptr);
    part_.add(std::exchange(other.part_, {}));
  }
  // The memory stays for ever, and counts for ever.
  void keep_for_good() noexcept {
    if (budget_ != nullptr) budget_->lose(part_);
    budget_ = nullptr;
  }
  uint64_t size_bytes() const { return part_.size_bytes(); }

 protected:
  Budget* budget_ = nullptr;
  Part part_{};
};

// Of device and host: the user's limit and, beside it, that of large model support; kUnlimited where there is none.
class Limits {
 public:
  uint64_t limit_bytes() const { return std::min(own_limit_bytes(), lms_limit_bytes()); }
  uint64_t own_limit_bytes() const { return own_bytes_.load(); }
  uint64_t lms_limit_bytes() const { return lms_bytes_.load(); }
  void set_limit(uint64_t bytes) { own_bytes_.store(bytes); }
  void set_lms_limit(uint64_t bytes) { lms_bytes_.store(bytes); }

 private:
  std::atomic<uint64_t> own_bytes_{kUnlimited};
  std::atomic<uint64_t> lms_bytes_{kUnlimited};
};

}  // namespace ebbtide
