#pragma once

#include <cstddef>
#include <deque>
#include <optional>

namespace ebbtide {

// Which bytes of a ring are in use: who takes room first gives it back first. Pure.
class RingRoom {
 public:
  explicit RingRoom(size_t size_bytes) : size_bytes_(size_bytes) {}

  // Where so many bytes in a row lie, from now on not free; none when there is no such room until others give back theirs. At most size_bytes; more than none.
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
