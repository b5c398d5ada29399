#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "api/guard.h"
#include "base/error.h"
#include "core/state/core.h"

// The opaque objects that ebbtide.h returns, by address. So an unknown handle, or one that was already given back, is
// an error and not a wild pointer.
namespace ebbtide::api {

template <typename Object>
class Handles {
 public:
  // what: "operation", for messages.
  explicit Handles(const char* what) : what_(what) {}

  Object* add(std::unique_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    live_.insert(object.get());
    return object.release();
  }
  // Throws InvalidArgument. The caller makes sure that the object is not given back meanwhile.
  const Object& at(const Object* handle) {
    require_not_forked();
    const std::lock_guard lock(mutex_);
    if (!live_.contains(const_cast<Object*>(handle))) throw_unknown();
    return *handle;
  }
  // Ends the handle. Throws InvalidArgument. In a forked child it throws StateError: the object's memory belongs to the
  // parent, and its locks may never open.
  std::unique_ptr<Object> take(Object* handle) {
    require_not_forked();
    const std::lock_guard lock(mutex_);
    if (live_.erase(handle) == 0) throw_unknown();
    return std::unique_ptr<Object>(handle);
  }

  // For functions that give back and report no error: ignores an unknown handle, and any handle in a forked child.
  void drop(Object* handle) noexcept {
    if (handle == nullptr) return;
    guarded(nullptr, [&] { take(handle); });
  }

 private:
  [[noreturn]] void throw_unknown() const {
    throw InvalidArgument(std::string("this is no ") + what_ + " of ebbtide, or it was given back before");
  }
  const char* const what_;
  std::mutex mutex_;
  std::set<Object*> live_;
};

}  // namespace ebbtide::api
