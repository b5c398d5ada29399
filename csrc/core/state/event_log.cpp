#include "core/state/event_log.h"

#include <chrono>

namespace ebbtide {

void EventLog::add(EventRecord record) noexcept {
  try {
    record.unix_seconds = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    const std::lock_guard lock(mutex_);
    record.sequence = ++sequence_;
    const bool is_repeat = !records_.empty() && !record.detail.empty() && records_.back().kind == record.kind &&
                           records_.back().tags == record.tags && record.kind.ends_with("_failed");
    if (is_repeat) records_.pop_back();
    records_.push_back(std::move(record));
    if (records_.size() > kCapacity) records_.pop_front();
  } catch (...) {
  }
}

std::vector<EventRecord> EventLog::after(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  std::vector<EventRecord> found;
  for (const EventRecord& record : records_) {
    if (record.sequence > sequence) found.push_back(record);
  }
  return found;
}

}  // namespace ebbtide
