#include "sim/rules.h"

#include <algorithm>
#include <cstring>

namespace ebbtide::sim {

Rules& rules() {
  static Rules* const instance = new Rules;
  return *instance;
}

Verdict Rules::count_call(const std::string& function) {
  std::lock_guard lock(mutex_);
  ++calls_[function];
  return judge_locked(function, true);
}

Verdict Rules::count_step(const std::string& name) {
  std::lock_guard lock(mutex_);
  return judge_locked(name, false);
}

Verdict Rules::judge_locked(const std::string& name, bool is_call) {
  Verdict verdict;
  verdict.is_hidden = hidden_.contains(name);
  if (const auto delay = delays_us_.find(name); delay != delays_us_.end()) verdict.delay_us = delay->second;
  for (Failure& failure : failures_) {
    if (failure.function.empty() ? !is_call : failure.function != name) continue;
    ++failure.seen;
    const bool is_due = failure.seen >= failure.first;
    const bool is_over = failure.times != 0 && failure.seen >= failure.first + failure.times;
    if (is_due && !is_over && !verdict.failure) verdict.failure = failure.code;
  }
  return verdict;
}

void Rules::log(std::string line) {
  std::lock_guard lock(mutex_);
  log_.push_back(std::move(line));
  if (log_.size() > kLogLines) log_.pop_front();
}

void Rules::fail(const std::string& function, uint64_t first, CUresult code, uint64_t times) {
  std::lock_guard lock(mutex_);
  failures_.push_back({function, first, times, code});
}

void Rules::clear_failures() {
  std::lock_guard lock(mutex_);
  failures_.clear();
}

void Rules::set_delay(const std::string& function, uint64_t microseconds) {
  std::lock_guard lock(mutex_);
  if (microseconds == 0) {
    delays_us_.erase(function);
  } else {
    delays_us_[function] = microseconds;
  }
}

void Rules::hide(const char* function) {
  std::lock_guard lock(mutex_);
  if (function == nullptr) {
    hidden_.clear();
  } else {
    hidden_.insert(function);
  }
}

bool Rules::is_hidden(const std::string& function) {
  std::lock_guard lock(mutex_);
  return hidden_.contains(function);
}

uint64_t Rules::calls(const std::string& function) {
  std::lock_guard lock(mutex_);
  if (!function.empty()) {
    const auto found = calls_.find(function);
    return found == calls_.end() ? 0 : found->second;
  }
  uint64_t total = 0;
  for (const auto& [name, count] : calls_) total += count;
  return total;
}

size_t Rules::copy_log(char* buffer, size_t capacity) {
  std::lock_guard lock(mutex_);
  size_t length = 0;
  for (const std::string& line : log_) {
    if (buffer != nullptr && length + 1 < capacity) {
      std::memcpy(buffer + length, line.data(), std::min(line.size(), capacity - 1 - length));
    }
    length += line.size();
  }
  if (buffer != nullptr && capacity > 0) buffer[std::min(length, capacity - 1)] = '\0';
  return length;
}

void Rules::clear_log() {
  std::lock_guard lock(mutex_);
  log_.clear();
  calls_.clear();
}

void Rules::reset() {
  std::lock_guard lock(mutex_);
  failures_.clear();
  delays_us_.clear();
  hidden_.clear();
  calls_.clear();
  log_.clear();
}

}  // namespace ebbtide::sim
