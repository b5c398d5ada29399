#include "store/ring_room.h"

namespace ebbtide {

std::optional<size_t> RingRoom::take(size_t size_bytes) {
  const size_t head = taken_.empty() ? 0 : taken_.back().end;
  const size_t tail = taken_.empty() ? size_bytes_ : taken_.front().begin;
  const bool has_wrapped = head <= tail;  // what is free lies between them; else before the tail and behind the head
  std::optional<size_t> begin;
  if (head + size_bytes <= (has_wrapped ? tail : size_bytes_)) {
    begin = head;
  } else if (!has_wrapped && size_bytes <= tail) {
    begin = 0;
  }
  if (begin) taken_.push_back({*begin, *begin + size_bytes});
  return begin;
}

}  // namespace ebbtide
