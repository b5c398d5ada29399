#pragma once

#include <cstddef>
#include <deque>
#include <optional>

namespace ebbtide {

// Which bytes of a ring are in use: who takes room first gives it back first. Pure.
class RingRoom {
 public:
  explicit RingRoom(size_t size_bytes) : size_bytes_(size_bytes) {}

  // Takes contiguous bytes of the ring, more than 0 and at most size_bytes, and returns their offset. None if there is
  // no such room until other room is given back.
  std::optional<size_t> take(size_t size_bytes);
  // The oldest room that was taken is free again.
  void give_back() { taken_.pop_front(); }

 private:
  struct Span {
    size_t begin;
    size_t end;
  };
  const size_t size_bytes_;
  std::deque<Span> taken_;
};

}  // namespace ebbtide
