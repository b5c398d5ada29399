#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "api/ebbtide.h"
#include "base/error.h"
#include "core/state/core.h"

// The boundary where exceptions become codes. Every function of ebbtide.h that can fail runs its body inside guarded()
// or with_core().
namespace ebbtide::api {

// Called inside a catch block. Fills *error, if given, from the exception in flight.
ebbtide_status translate_exception(ebbtide_error* error) noexcept;

// Runs body, fills *error if given, and returns its status. Never throws. A template, so that body is not copied to the
// heap outside the try.
template <typename Body>
ebbtide_status guarded(ebbtide_error* error, Body&& body) noexcept {
  if (error != nullptr) *error = EBBTIDE_ERROR_INIT;
  try {
    std::forward<Body>(body)();
    return EBBTIDE_OK;
  } catch (...) {
    return translate_exception(error);
  }
}

// The same for body(core). In a forked child it is a StateError: another thread may have held a lock at the fork.
template <typename Body>
ebbtide_status with_core(ebbtide_error* error, Body&& body) noexcept {
  return guarded(error, [&] {
    require_not_forked();
    std::forward<Body>(body)(Core::instance());
  });
}

// Throw InvalidArgument.
void require(bool condition, const char* message);
template <typename Pointed>
void require_given(Pointed* pointer, const char* name) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " is null");
}

// Throws StateError where the driver is HIP: there, no memory that is in use lies on the host.
void require_overflow();

// Fixed-size text fields: cuts, always ends with NUL, never cuts inside a UTF-8 character.
void copy_text(char* to, size_t capacity, const char* from) noexcept;

// The opaque objects that ebbtide.h returns, by address. So an unknown handle, or one that was already given back, is
// an error and not a wild pointer. Object::kName is for messages: "operation".
template <typename Object>
class Handles {
 public:
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
    if (handle != nullptr) guarded(nullptr, [&] { take(handle); });
  }

 private:
  [[noreturn]] void throw_unknown() const {
    throw InvalidArgument(std::string("this is no ") + Object::kName + " of ebbtide, or it was given back before");
  }
  std::mutex mutex_;
  std::set<Object*> live_;
};

// Leaked on purpose: handles are given back after static destructors have run, too.
template <typename Object>
Handles<Object>& handles() {
  static auto* const table = new Handles<Object>;
  return *table;
}

}  // namespace ebbtide::api
