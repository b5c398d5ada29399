#include "store/host_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "store/populate.h"
#include "vmm/deferred_undos.h"

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

std::unique_ptr<HostMemory> HostMemory::map(size_t size_bytes) {
  // One huge page more than needed, so that the bytes can begin on a huge page's boundary.
  const size_t mapping_bytes = saturating_add(size_bytes, kHugePage);
  void* mapping =
      ::mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw StoreError("the system refuses " + format_bytes(size_bytes) + " of address space: " + std::strerror(errno) +
                         ". Look at `ulimit -v` and vm.max_map_count",
                     {size_bytes, 0, kUnlimited});
  }
  auto* bytes = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(mapping), kHugePage));
  ::madvise(bytes, size_bytes, MADV_HUGEPAGE);  // only advice: if it is refused, small pages are used
  // A forked child would keep, uncounted, pages that this process gives back or overwrites.
  ::madvise(mapping, mapping_bytes, MADV_DONTFORK);
  std::unique_ptr<HostMemory> memory(new HostMemory(bytes, size_bytes));
  memory->mapping_ = mapping;
  memory->mapping_bytes_ = mapping_bytes;
  return memory;
}

std::unique_ptr<HostMemory> HostMemory::allocate(size_t size_bytes) {
  void* bytes = nullptr;
  check(driver().cuMemHostAlloc(&bytes, size_bytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc",
        "size=" + std::to_string(size_bytes));
  std::unique_ptr<HostMemory> memory(new HostMemory(static_cast<std::byte*>(bytes), size_bytes));
  memory->is_pinned_.store(true);
  return memory;
}

std::unique_ptr<HostMemory> HostMemory::pin(size_t size_bytes, int threads) {
  auto memory = map(size_bytes);
  memory->populate(threads);
  check(memory->try_pin(), "cuMemHostRegister", "size=" + std::to_string(size_bytes));
  return memory;
}

HostMemory::~HostMemory() {
  if (is_abandoned()) return;
  const auto object = reinterpret_cast<uint64_t>(bytes_);
  if (mapping_ == nullptr)
    Undo{.kind = Undo::Kind::kHostFree, .object = object, .size_bytes = size_bytes_, .handle = object}.undo();
  else if (is_pinned())
    Undo{.kind = Undo::Kind::kHostUnregister,
         .object = object,
         .size_bytes = mapping_bytes_,
         .handle = object,
         .mapping = mapping_}
        .undo();
  else
    ::munmap(mapping_, mapping_bytes_);
}

void HostMemory::populate(size_t offset, size_t range_bytes) const {
  int result = 0;
  do {
    result = ::madvise(bytes_ + offset, range_bytes, kPopulateWrite);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  // Unknown before Linux 5.14, and everywhere for a range that begins within a page.
  if (errno == EINVAL) return touch_pages(bytes_ + offset, range_bytes);
  throw StoreError("the system gives no memory for " + format_bytes(size_bytes_) +
                       " on the host: " + std::strerror(errno) + ". Free memory on this machine",
                   {range_bytes, 0, kUnlimited});
}

void HostMemory::populate(int threads) const {
  populate_ranges({{[this](size_t offset, size_t range_bytes) { populate(offset, range_bytes); }, size_bytes_}},
                  threads);
}

void HostMemory::discard(size_t offset, size_t range_bytes) const noexcept {
  const size_t begin = round_up(offset, kPage);
  const size_t end = (offset + range_bytes) / kPage * kPage;
  if (begin < end) ::madvise(bytes_ + begin, end - begin, MADV_DONTNEED);
}

CUresult HostMemory::try_pin() {
  const CUresult result =
      driver().cuMemHostRegister(bytes_, size_bytes_, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  is_pinned_.store(result == CUDA_SUCCESS);
  return result;
}

}  // namespace ebbtide
