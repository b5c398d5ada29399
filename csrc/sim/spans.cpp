#include "sim/spans.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

constexpr uint64_t kBounceBytes = 1 << 20;

// All reads and writes of a block's file end in read_file() or write_file(). A bad address is EFAULT there, not a
// signal.
bool read_file(const Span& from, void* to) {
  auto* target = static_cast<char*>(to);
  for (uint64_t done = 0; done < from.size;) {
    const ssize_t step =
        pread(from.block->backing->fd, target + done, from.size - done, static_cast<off_t>(from.position + done));
    if (step <= 0) return false;
    done += static_cast<uint64_t>(step);
  }
  return true;
}

bool is_beyond_file_limit(uint64_t end) {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && end > limit.rlim_cur;
}

// A limit on the size of files does not apply to a device's memory. Bytes that pwrite may not write are written through
// a mapping. A bad address is an error here too.
bool write_mapped(const void* from, const Span& to) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t skipped = to.position % page;
  void* const mapping = mmap(nullptr, skipped + to.size, PROT_READ | PROT_WRITE, MAP_SHARED, to.block->backing->fd,
                             static_cast<off_t>(to.position - skipped));
  if (mapping == MAP_FAILED) return false;
  uint64_t done = 0;
  while (done < to.size) {
    const iovec target{static_cast<char*>(mapping) + skipped + done, to.size - done};
    const iovec source{const_cast<char*>(static_cast<const char*>(from)) + done, to.size - done};
    const ssize_t step = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
    if (step <= 0) break;
    done += static_cast<uint64_t>(step);
  }
  munmap(mapping, skipped + to.size);
  return done == to.size;
}

bool write_file(const void* from, const Span& to) {
  // Checked first, because a write beyond the limit raises a signal that ends the process.
  if (is_beyond_file_limit(to.position + to.size)) return write_mapped(from, to);
  const auto* source = static_cast<const char*>(from);
  for (uint64_t done = 0; done < to.size;) {
    const ssize_t step =
        pwrite(to.block->backing->fd, source + done, to.size - done, static_cast<off_t>(to.position + done));
    if (step <= 0) return false;
    done += static_cast<uint64_t>(step);
  }
  return true;
}

// A number in pinned memory may be written by the processor at the same time, so it is accessed atomically. Null if the
// number is not in pinned memory.
uint32_t* as_host_number(const Spans& spans) {
  return spans.front().block == nullptr ? reinterpret_cast<uint32_t*>(spans.front().position) : nullptr;
}

// The device whose access rights apply. Memory of cuMemAlloc has only the access of its own device, which also stands
// for other devices that may use the memory.
int acting_device(const Reservation& reservation, bool is_copied, int device) {
  if (!reservation.linear) return device;
  const uint64_t owner = reservation.linear->context;
  const bool is_enabled = simulator().peers.is_enabled(Contexts::id_of_device(device), owner);
  const bool may_use = is_copied || is_enabled || reservation.linear->is_managed;
  return may_use ? simulator().contexts.find(owner)->device : device;
}

}  // namespace

bool move_piece(const Span& to, const Span& from) {
  void* target = reinterpret_cast<void*>(to.position);
  const void* source = reinterpret_cast<const void*>(from.position);
  if (to.block == nullptr && from.block == nullptr) {
    std::memmove(target, source, to.size);
    return true;
  }
  if (to.block == nullptr) return read_file(from, target);
  if (from.block == nullptr) return write_file(source, to);
  std::vector<char> bounce(std::min(kBounceBytes, to.size));
  for (uint64_t done = 0; done < to.size; done += bounce.size()) {
    const uint64_t step = std::min<uint64_t>(bounce.size(), to.size - done);
    if (!read_file({from.block, from.position + done, step}, bounce.data())) return false;
    if (!write_file(bounce.data(), {to.block, to.position + done, step})) return false;
  }
  return true;
}

bool move_bytes(const Spans& to, const Spans& from, uint64_t size) {
  size_t to_index = 0, from_index = 0;
  uint64_t to_done = 0, from_done = 0;
  while (size > 0) {
    const Span& target = to[to_index];
    const Span& source = from[from_index];
    const uint64_t step = std::min(target.size - to_done, source.size - from_done);
    if (!move_piece({target.block, target.position + to_done, step},
                    {source.block, source.position + from_done, step})) {
      return false;
    }
    size -= step;
    if ((to_done += step) == target.size) ++to_index, to_done = 0;
    if ((from_done += step) == source.size) ++from_index, from_done = 0;
  }
  return true;
}

std::optional<Spans> resolve(Lock&, const Address& address, uint64_t size, AccessKind kind, int device) {
  const AddressSpace& space = simulator().address_space;
  const auto reservation = space.find_reservation(address.value);
  if (!reservation && (!address.is_device || simulator().host_memory.holds(address.value, size))) {
    return Spans{{nullptr, address.value, size}};
  }
  if (!reservation) return std::nullopt;
  const int acting = acting_device(*reservation->second, address.is_copied, device);
  const auto ranges = space.resolve(address.value, size, kind, acting);
  if (!ranges) return std::nullopt;
  Spans spans;
  for (const BlockRange& range : *ranges) spans.push_back({range.block, range.offset, range.size});
  return spans;
}

std::optional<uint32_t> read_number(Lock& lock, uint64_t address, int device) {
  const auto spans = resolve(lock, {address, true}, sizeof(uint32_t), AccessKind::kRead, device);
  if (!spans) return std::nullopt;
  if (const uint32_t* number = as_host_number(*spans)) return __atomic_load_n(number, __ATOMIC_ACQUIRE);
  uint32_t number = 0;
  const Spans own{{nullptr, reinterpret_cast<uint64_t>(&number), sizeof number}};
  return move_bytes(own, *spans, sizeof number) ? std::optional(number) : std::nullopt;
}

bool write_number(Lock& lock, uint64_t address, uint32_t value, int device) {
  const auto spans = resolve(lock, {address, true}, sizeof value, AccessKind::kWrite, device);
  if (!spans) return false;
  if (uint32_t* number = as_host_number(*spans)) {
    __atomic_store_n(number, value, __ATOMIC_RELEASE);
    return true;
  }
  return move_bytes(*spans, {{nullptr, reinterpret_cast<uint64_t>(&value), sizeof value}}, sizeof value);
}

}  // namespace ebbtide::sim
