#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "api/ebbtide.h"

// The two C functions for each slot that torch's pluggable allocators call. torch passes size, device and stream and
// nothing else, so the slot's number is part of the function's type.
//
// torch calls them under its allocator's lock, from any thread, during captures, and after the interpreter has ended.
// So they never wait for a lock, and never throw.
namespace {

using MallocFunction = void* (*)(ptrdiff_t, int, void*);

// The device that torch names is the thread's current one; the slot knows the pool's (csrc/DESIGN.md, F36).
template <size_t kSlot>
void* allocate(ptrdiff_t size_bytes, int /*device*/, void* stream) {
  return size_bytes <= 0 ? nullptr
                         : ebbtide_slot_alloc(static_cast<int32_t>(kSlot), static_cast<uint64_t>(size_bytes), stream);
}

// One function serves every slot: a free finds its allocation by address.
void release(void* address, ptrdiff_t /*size_bytes*/, int /*device*/, void* /*stream*/) { ebbtide_slot_free(address); }

template <size_t... kSlots>
constexpr std::array<MallocFunction, sizeof...(kSlots)> make_table(std::index_sequence<kSlots...>) {
  return {&allocate<kSlots>...};
}
constexpr auto kAllocate = make_table(std::make_index_sequence<EBBTIDE_SLOT_COUNT>());

}  // namespace

extern "C" ebbtide_status ebbtide_torch_functions(int32_t slot, void** malloc_function, void** free_function,
                                                  ebbtide_error* error) {
  if (error != nullptr) *error = EBBTIDE_ERROR_INIT;
  if (slot >= 0 && slot < EBBTIDE_SLOT_COUNT && malloc_function != nullptr && free_function != nullptr) {
    *malloc_function = reinterpret_cast<void*>(kAllocate[static_cast<size_t>(slot)]);
    *free_function = reinterpret_cast<void*>(&release);
    return EBBTIDE_OK;
  }
  if (error != nullptr) {
    error->status = EBBTIDE_INVALID_ARGUMENT;
    std::snprintf(error->message, sizeof error->message, "there is no slot %d, or an output is null", slot);
  }
  return EBBTIDE_INVALID_ARGUMENT;
}
