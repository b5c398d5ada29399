#include "store/anonymous_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace ebbtide {
namespace {

constexpr size_t kHugePage = 2 * kMiB;
constexpr size_t kPage = 4 * kKiB;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE: older C libraries have no name for it

// Writes each page's own byte back, so nothing else may write there meanwhile.
void touch_pages(std::byte* bytes, size_t size_bytes) {
  volatile std::byte* const start = bytes;
  for (size_t at = 0; at < size_bytes; at += kPage - reinterpret_cast<uintptr_t>(bytes + at) % kPage) {
    start[at] = start[at];
  }
}

}  // namespace

AnonymousMemory AnonymousMemory::map(size_t size_bytes) {
  // One huge page more than needed, so that the bytes can begin on a huge page's boundary.
  const size_t mapping_bytes = saturating_add(size_bytes, kHugePage);
  void* mapping =
      ::mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw StoreError("the system refuses " + format_bytes(size_bytes) + " of address space for a backup: " +
                         std::strerror(errno) + ". Look at `ulimit -v` and vm.max_map_count",
                     {size_bytes, 0, kUnlimited});
  }
  const auto start = round_up(reinterpret_cast<uintptr_t>(mapping), kHugePage);
  auto* bytes = reinterpret_cast<std::byte*>(start);
  ::madvise(bytes, size_bytes, MADV_HUGEPAGE);  // only advice: if it is refused, small pages are used
  // A forked child would keep what this process gives back or overwrites, uncounted.
  ::madvise(mapping, mapping_bytes, MADV_DONTFORK);
  return {mapping, mapping_bytes, bytes, size_bytes};
}

AnonymousMemory::AnonymousMemory(AnonymousMemory&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_bytes_(other.mapping_bytes_),
      bytes_(std::exchange(other.bytes_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

AnonymousMemory::~AnonymousMemory() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
}

void AnonymousMemory::populate(size_t offset, size_t range_bytes) const {
  int result = 0;
  do {
    result = ::madvise(bytes_ + offset, range_bytes, kPopulateWrite);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  // Unknown before Linux 5.14, and everywhere for a range that begins within a page.
  if (errno == EINVAL) return touch_pages(bytes_ + offset, range_bytes);
  throw StoreError("the system gives no memory for a backup of " + format_bytes(size_bytes_) + ": " +
                       std::strerror(errno) + ". Free memory on this machine, or pause less at once",
                   {range_bytes, 0, kUnlimited});
}

void AnonymousMemory::discard(size_t offset, size_t range_bytes) const noexcept {
  const size_t begin = round_up(offset, kPage);
  const size_t end = (offset + range_bytes) / kPage * kPage;
  if (begin < end) ::madvise(bytes_ + begin, end - begin, MADV_DONTNEED);
}

AnonymousMemory::Range AnonymousMemory::release() noexcept {
  return {std::exchange(mapping_, nullptr), mapping_bytes_};
}

}  // namespace ebbtide
