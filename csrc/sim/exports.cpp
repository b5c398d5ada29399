// Blocks that other processes may have: a block with a file of its own, and descriptors of that file.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>

#include "sim/entry.h"
#include "sim/host_memory.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

// The last page of the file of an exportable block, behind the block.
struct BlockFacts {
  uint64_t magic;
  uint64_t size;
  CUmemLocation location;
  uint64_t number;
};
constexpr uint64_t kFactsMagic = 0x656262746c626c6b;

std::shared_ptr<Backing> make_block_file(uint64_t size_bytes, CUmemLocation location) {
  const int fd = make_memory_file("ebbtide-sim-block", static_cast<off_t>(size_bytes + kPage));
  if (fd < 0) return nullptr;
  struct stat found{};
  fstat(fd, &found);
  auto backing = std::make_shared<Backing>(fd, found.st_ino);
  // Through a mapping, to which no limit on the size of files applies.
  void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(size_bytes));
  if (page == MAP_FAILED) return nullptr;
  *static_cast<BlockFacts*>(page) = {kFactsMagic, size_bytes, location, found.st_ino};
  munmap(page, kPage);
  return backing;
}

// Nothing if it is no file of a block.
std::optional<BlockFacts> read_block_file(int fd) {
  struct stat found{};
  BlockFacts facts{};
  if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) return std::nullopt;
  if (found.st_size < static_cast<off_t>(kPage)) return std::nullopt;
  const off_t end = found.st_size - static_cast<off_t>(kPage);
  if (pread(fd, &facts, sizeof(facts), end) != sizeof(facts)) return std::nullopt;
  const bool is_one =
      facts.magic == kFactsMagic && facts.size == static_cast<uint64_t>(end) && facts.number == found.st_ino;
  return is_one ? std::optional(facts) : std::nullopt;
}

}  // namespace

CUresult PhysicalMemory::allocate_exportable(uint64_t size, CUmemLocation location, uint64_t id, Block& block) {
  const auto backing = make_block_file(size, location);
  if (backing == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  const CUresult result = make_block(backing, size, location, id, block);
  if (result == CUDA_SUCCESS) note_exportable(block);
  return result;
}

void PhysicalMemory::note_exportable(const Block& block) {
  std::erase_if(exportable_, [](const auto& entry) { return entry.second.expired(); });
  exportable_[block->backing->number] = block;
}

CUresult PhysicalMemory::export_file(int& file, uint64_t handle) {
  const Block block = find(handle);
  if (block == nullptr || !block->is_exportable()) return CUDA_ERROR_INVALID_VALUE;
  file = fcntl(block->backing->fd, F_DUPFD_CLOEXEC, 0);
  return file < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult PhysicalMemory::import_file(uint64_t& handle, int file, uint64_t new_id) {
  const auto found = read_block_file(file);
  if (!found) return CUDA_ERROR_UNKNOWN;
  if (check_location(found->location) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  const auto known = exportable_.find(found->number);
  const Block first = known == exportable_.end() ? nullptr : known->second.lock();
  Block block;
  if (first != nullptr) {
    block = std::make_shared<PhysicalBlock>(first, new_id);
  } else {
    const int own = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    const auto backing = std::make_shared<Backing>(own, found->number);
    const CUresult failed = make_block(backing, found->size, found->location, new_id, block);
    if (failed != CUDA_SUCCESS) return failed;
    note_exportable(block);
  }
  block->is_imported = true;
  retain(block);
  handle = new_id;
  return CUDA_SUCCESS;
}

namespace {

CUresult export_handle(void* shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType,
                       unsigned long long flags) {
  if (shareableHandle == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  return simulator().physical.export_file(*static_cast<int*>(shareableHandle), handle);
}

CUresult import_handle(CUmemGenericAllocationHandle* handle, void* osHandle, CUmemAllocationHandleType shHandleType) {
  if (handle == nullptr || shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  uint64_t imported = 0;
  const int file = static_cast<int>(reinterpret_cast<intptr_t>(osHandle));
  const CUresult result = simulator().physical.import_file(imported, file, simulator().next_id());
  if (result == CUDA_SUCCESS) *handle = imported;
  return result;
}

CUresult describe_handle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  if (prop == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const Block block = simulator().physical.find(handle);
  if (block == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *prop = CUmemAllocationProp{};
  prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop->location = block->location;
  if (block->is_exportable()) prop->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuMemExportToShareableHandle(void* shareableHandle, CUmemGenericAllocationHandle handle,
                                                         CUmemAllocationHandleType handleType,
                                                         unsigned long long flags) {
  EBBTIDE_SIM_FORWARD(cuMemExportToShareableHandle, kDriver, export_handle, shareableHandle, handle, handleType, flags);
}

EBBTIDE_SIM_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* osHandle,
                                                           CUmemAllocationHandleType shHandleType) {
  EBBTIDE_SIM_FORWARD(cuMemImportFromShareableHandle, kDriver, import_handle, handle, osHandle, shHandleType);
}

EBBTIDE_SIM_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                                   CUmemGenericAllocationHandle handle) {
  EBBTIDE_SIM_FORWARD(cuMemGetAllocationPropertiesFromHandle, kDriver, describe_handle, prop, handle);
}
