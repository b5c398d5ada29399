// Memory that ebbtide.lms can free when an allocation finds none: it evicts saved tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace c10 {
class DataPtr;
}

namespace ebbtide::cpu {

// evict: makes so many bytes free, or as many as it can, and returns how many. It is called by the allocating thread,
// with no lock held, and allocates no device memory. explain: why it could do no more; it ends the text with NUL.
// overflow: memory for what finds no room all the same, in the thread's region; false: none. took: the program has
// allocated so many bytes.
struct Reclaimer {
  uint64_t (*evict)(uint64_t wanted_bytes);
  void (*explain)(char* text, size_t capacity);
  bool (*overflow)(size_t size_bytes, c10::DataPtr* data);
  void (*took)(size_t size_bytes);
};

// For all threads. Null functions: no memory can be freed.
void set_reclaimer(const Reclaimer& reclaimer);
bool can_reclaim();
uint64_t reclaim(uint64_t wanted_bytes);
std::string explain_reclaim();
bool take_overflow(size_t size_bytes, c10::DataPtr* data);
void note_taken(size_t size_bytes);

}  // namespace ebbtide::cpu
