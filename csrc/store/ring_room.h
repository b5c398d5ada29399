#pragma once

#include <cstddef>
#include <deque>
#include <optional>

namespace ebbtide {

// The bytes of a ring that are in use. Room is given back in the order in which it was taken. Pure.
class RingRoom {
 public:
  explicit RingRoom(size_t size_bytes) : size_bytes_(size_bytes) {}

  // Takes contiguous bytes of the ring, more than 0 and at most size_bytes, and returns their offset. None if there is
  // no such room until other room is given back.
  std::optional<size_t> take(size_t size_bytes);
  // Frees the oldest room that was taken.
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
