#pragma once

#include <utility>

namespace ebbtide {

// Runs its function when the scope ends, unless dismissed. The function must not throw.
template <typename Function>
class ScopeExit {
 public:
  explicit ScopeExit(Function function) : function_(std::move(function)) {}
  ScopeExit(const ScopeExit&) = delete;
  ScopeExit& operator=(const ScopeExit&) = delete;
  ~ScopeExit() {
    if (is_armed_) function_();
  }
  void dismiss() { is_armed_ = false; }

 private:
  Function function_;
  bool is_armed_ = true;
};

}  // namespace ebbtide
