#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "base/error.h"
#include "core/registry/handler_safe_mutex.h"
#include "core/registry/tag.h"

namespace ebbtide {

struct LeaseInfo {
  uint64_t id = 0;
  uint64_t epoch = 0;
  bool is_away = false;
};

// The open leases. Each function takes the registry's lock, under which a claim looks at Tag::leases and holds the tags
// in one step.
class Leases {
 public:
  explicit Leases(HandlerSafeMutex& registry_mutex) : mutex_(registry_mutex) {}

  LeaseInfo open(Tag& tag, const std::string& holder) {
    const std::lock_guard lock(mutex_);
    const uint64_t id = ++newest_;
    tags_.emplace(id, &tag);
    try {
      tag.leases.emplace(id, holder);
    } catch (...) {
      tags_.erase(id);
      throw;
    }
    tag.last_lease = id;
    return {id, tag.epoch, tag.is_any_away()};
  }
  void close(uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = tags_.find(id);
    if (found == tags_.end()) throw InvalidArgument("there is no open lease " + std::to_string(id));
    found->second->leases.erase(id);
    tags_.erase(found);
  }
  bool is_open(uint64_t id) const {
    const std::lock_guard lock(mutex_);
    return tags_.contains(id);
  }
  // The number of the newest lease that was ever opened.
  uint64_t newest() const {
    const std::lock_guard lock(mutex_);
    return newest_;
  }

 private:
  HandlerSafeMutex& mutex_;
  std::map<uint64_t, Tag*> tags_;  // by lease
  uint64_t newest_ = 0;
};

}  // namespace ebbtide
