#include "store/ram_store.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "store/nontemporal_copy.h"

namespace ebbtide {
namespace {

constexpr size_t kHugePage = 2 * kMiB;

class RamBackup : public Backup {
 public:
  RamBackup(void* mapping, size_t mapping_bytes, std::byte* bytes)
      : mapping_(mapping), mapping_bytes_(mapping_bytes), bytes_(bytes) {}
  RamBackup(const RamBackup&) = delete;
  RamBackup& operator=(const RamBackup&) = delete;
  ~RamBackup() override { ::munmap(mapping_, mapping_bytes_); }

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    copy_nontemporal(bytes_ + offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    copy_nontemporal(bytes, bytes_ + offset, size_bytes);
  }
  void discard(size_t offset, size_t size_bytes) noexcept override {
    ::madvise(bytes_ + offset, size_bytes, MADV_DONTNEED);
  }
  const std::byte* view() const override { return bytes_; }

 private:
  void* mapping_;
  size_t mapping_bytes_;
  std::byte* bytes_;
};

}  // namespace

std::unique_ptr<Backup> RamStore::open(size_t size_bytes) {
  // One huge page more than needed, so that the bytes can begin on a huge page's boundary.
  const size_t mapping_bytes = size_bytes + kHugePage;
  void* mapping =
      ::mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw StoreError("the system refuses " + format_bytes(size_bytes) + " of address space for a backup: " +
                         std::strerror(errno) + ". Look at `ulimit -v` and vm.max_map_count",
                     {size_bytes, 0, kUnlimited});
  }
  const auto start = round_up(reinterpret_cast<uintptr_t>(mapping), kHugePage);
  auto* bytes = reinterpret_cast<std::byte*>(start);
  ::madvise(bytes, size_bytes, MADV_HUGEPAGE);  // advice: where it is refused, small pages serve
  return std::make_unique<RamBackup>(mapping, mapping_bytes, bytes);
}

}  // namespace ebbtide
