#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace ebbtide {

struct EventRecord {
  uint64_t sequence = 0;
  double unix_seconds = 0;
  double seconds = 0;
  std::string kind;
  std::string tags;
  uint64_t bytes = 0;
  uint64_t copied = 0;
  std::string detail;
};

// The newest events, bounded.
class EventLog {
 public:
  static constexpr size_t kCapacity = 1024;
  // Numbers and stamps the record. A failure that repeats the newest record replaces it, so that retries do not push
  // out everything else. Never throws: an event is dropped if there is no memory for it.
  void add(EventRecord record) noexcept;
  std::vector<EventRecord> after(uint64_t sequence) const;

 private:
  mutable std::mutex mutex_;
  std::deque<EventRecord> records_;
  uint64_t sequence_ = 0;
};

}  // namespace ebbtide
