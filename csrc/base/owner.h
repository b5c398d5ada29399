#pragma once

#include <utility>

namespace ebbtide {

// Owns what an object describes, and calls its undo() once. An object that is false, as Object{} is, describes nothing.
template <typename Object>
class Owner {
 public:
  Owner() = default;
  Owner(Owner&& other) noexcept : object_(std::exchange(other.object_, {})) {}
  Owner& operator=(Owner&& other) noexcept {
    Owner taken(std::move(other));
    std::swap(object_, taken.object_);
    return *this;
  }

 protected:
  explicit Owner(Object object) noexcept : object_(std::move(object)) {}
  ~Owner() {
    if (object_) object_.undo();
  }
  Object object_;
};

}  // namespace ebbtide
