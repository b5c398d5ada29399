#include "lms/evicted_memory.h"

#include <unistd.h>

#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "core/state/core.h"

namespace ebbtide::lms {
namespace {

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

std::byte* EvictedMemory::take(size_t size_bytes) {
  if (size_bytes == 0) throw InvalidArgument("size_bytes is 0");
  const size_t rounded = (size_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  HostCharge charge = budget_.charge(rounded, "evicted memory");
  AnonymousMemory memory = AnonymousMemory::map(rounded);
  memory.populate(0, rounded);
  charge.touch(rounded);
  std::byte* const address = memory.bytes();
  const std::lock_guard lock(mutex_);
  pieces_.emplace(address, Piece{std::move(memory), std::move(charge)});
  held_bytes_ += rounded;
  return address;
}

void EvictedMemory::give_back(void* address) {
  const auto taken = [&] {
    const std::lock_guard lock(mutex_);
    auto node = pieces_.extract(address);
    if (node.empty()) throw InvalidArgument("no evicted memory begins at this address");
    held_bytes_ -= node.mapped().memory.size_bytes();
    return node;
  }();
  // Its pages go back to the system here, without the lock.
}

uint64_t EvictedMemory::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

EvictedMemory& evicted_memory() {
  static auto* const memory = new EvictedMemory(Core::instance().budgets.host);
  return *memory;
}

}  // namespace ebbtide::lms
