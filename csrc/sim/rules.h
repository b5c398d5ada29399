// What tests can set and read at the entry guard: planted failures, delays, hidden functions, call counts and the log.
// The class has a lock of its own, which is never held while other code of the simulator runs.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace ebbtide::sim {

struct Verdict {
  std::optional<CUresult> failure;
  bool is_hidden = false;
  uint64_t delay_us = 0;
};

class Rules {
 public:
  Verdict count_call(const std::string& function);
  // A step of a longer piece of work. It is not a call: only rules that name it apply.
  Verdict count_step(const std::string& name);
  void log(std::string line);

  // An empty `function` means every function.
  void fail(const std::string& function, uint64_t first, CUresult code, uint64_t times);
  void clear_failures();
  void set_delay(const std::string& function, uint64_t microseconds);
  void hide(const char* function);
  bool is_hidden(const std::string& function);

  uint64_t calls(const std::string& function);
  size_t copy_log(char* buffer, size_t capacity);
  void clear_log();
  void reset();

 private:
  struct Failure {
    std::string function;
    uint64_t first;
    uint64_t times;
    CUresult code;
    uint64_t seen = 0;
  };
  static constexpr size_t kLogLines = 65536;
  Verdict judge_locked(const std::string& name, bool is_call);

  std::mutex mutex_;
  std::vector<Failure> failures_;
  std::map<std::string, uint64_t> delays_us_;
  std::set<std::string> hidden_;
  std::map<std::string, uint64_t> calls_;
  std::deque<std::string> log_;
};

// Made at the first call and never destroyed.
Rules& rules();

}  // namespace ebbtide::sim
