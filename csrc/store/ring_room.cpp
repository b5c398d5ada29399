#include "store/ring_room.h"

namespace ebbtide {

std::optional<size_t> RingRoom::take(size_t size_bytes) {
  const size_t head = taken_.empty() ? 0 : taken_.back().end;
  const size_t tail = taken_.empty() ? size_bytes_ : taken_.front().begin;
  const bool is_one_range = head <= tail;  // free room lies between them; else behind the head and before the tail
  std::optional<size_t> begin;
  if (head + size_bytes <= (is_one_range ? tail : size_bytes_)) {
    begin = head;
  } else if (!is_one_range && size_bytes <= tail) {
    begin = 0;
  }
  if (begin) taken_.push_back({*begin, *begin + size_bytes});
  return begin;
}

}  // namespace ebbtide
