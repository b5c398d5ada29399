#include "sim/physical.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/settings.h"
#include "sim/entry.h"
#include "sim/quirks.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

// Far more than any test creates in one process.
constexpr off_t kBackingBytes = 1ll << 50;
constexpr uint64_t kMostKeptBytes = 64 << 20;
constexpr uint64_t kLargestHandleBytes = 256 << 20;  // with the quirk
constexpr unsigned char kStaleByte = 0xb5;

int device_count_from_environment() { return static_cast<int>(read_number(Setting::kSimDevices).value_or(1)); }

}  // namespace

namespace {

// Exceeding the limit on the size of files raises a signal that ends the process. If the system permits it, the limit
// is lifted for this one call.
bool make_long(int fd, off_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= static_cast<rlim_t>(bytes))
    return ftruncate(fd, bytes) == 0;
  if (limit.rlim_max < static_cast<rlim_t>(bytes)) return false;
  const rlimit lifted{limit.rlim_max, limit.rlim_max};
  if (setrlimit(RLIMIT_FSIZE, &lifted) != 0) return false;
  const bool is_long = ftruncate(fd, bytes) == 0;
  setrlimit(RLIMIT_FSIZE, &limit);
  return is_long;
}

void punch(int fd, uint64_t offset, uint64_t size_bytes) noexcept {
  fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(size_bytes));
}

bool has_pages(int fd, uint64_t offset, uint64_t size_bytes) noexcept {
  const off_t found = lseek(fd, static_cast<off_t>(offset), SEEK_DATA);
  return found >= 0 && static_cast<uint64_t>(found) < offset + size_bytes;
}

// Through a mapping, to which no limit on the size of files applies.
bool set_bytes(int fd, uint64_t offset, uint64_t size_bytes, unsigned char value) noexcept {
  void* const mapping =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (mapping == MAP_FAILED) return false;
  std::memset(mapping, value, size_bytes);
  munmap(mapping, size_bytes);
  return true;
}

bool clear(int fd, uint64_t offset, uint64_t size_bytes) noexcept {
  return !has_pages(fd, offset, size_bytes) || set_bytes(fd, offset, size_bytes, 0);
}

}  // namespace

int make_memory_file(const char* name, off_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || make_long(fd, bytes)) return fd;
  close(fd);
  return -1;
}

std::shared_ptr<Backing> Backing::make(const char* name) {
  const int fd = make_memory_file(name, kBackingBytes);
  return fd < 0 ? nullptr : std::make_shared<Backing>(fd);
}

Backing::Backing(int file, uint64_t number) : fd(file), number(number), owner_(getpid()) {}

Backing::~Backing() { close(fd); }

bool Backing::is_own() const { return getpid() == owner_; }

uint64_t Backing::take(uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  const auto kept = kept_.find(size_bytes);
  if (kept != kept_.end()) {
    const uint64_t offset = kept->second;
    kept_.erase(kept);
    kept_bytes_ -= size_bytes;
    if (clear(fd, offset, size_bytes)) return offset;
    punch(fd, offset, size_bytes);
  }
  return std::exchange(next_offset, next_offset + size_bytes);
}

void Backing::give_back(uint64_t offset, uint64_t size_bytes) noexcept try {
  if (number != 0) return;  // another process may have the block
  const std::lock_guard lock(mutex_);
  if (kept_bytes_ + size_bytes > kMostKeptBytes) return punch(fd, offset, size_bytes);
  kept_.emplace(size_bytes, offset);
  kept_bytes_ += size_bytes;
} catch (const std::bad_alloc&) {
  punch(fd, offset, size_bytes);
}

PhysicalBlock::PhysicalBlock(std::shared_ptr<Backing> file, uint64_t size_bytes, CUmemLocation where, uint64_t handle,
                             DeviceUse& use)
    : backing(std::move(file)),
      offset(backing->take(size_bytes)),
      size(size_bytes),
      location(where),
      id(handle),
      use_(use) {
  if (is_on_device() && has(Quirk::kStale)) set_bytes(backing->fd, offset, size, kStaleByte);
}

PhysicalBlock::PhysicalBlock(std::shared_ptr<PhysicalBlock> block, uint64_t handle)
    : first(std::move(block)),
      backing(first->backing),
      offset(first->offset),
      size(first->size),
      location(first->location),
      id(handle),
      use_(first->use_) {}

PhysicalBlock::~PhysicalBlock() {
  if (first != nullptr) return;
  backing->give_back(offset, size);
  if (is_on_device()) use_.give_back(location.id, size, backing->number);
}

PhysicalMemory::PhysicalMemory() { reset(); }

void PhysicalMemory::reset() {
  read_quirks();
  handles_.clear();
  exportable_.clear();
  use_.reset();
  for (auto& [device, state] : devices_) state = Device{.backing = reusable(state.backing)};
  host_ = reusable(host_);
  set_device_count(device_count_from_environment());
}

// Files of which nothing is in use stay, with the pages that they keep.
std::shared_ptr<Backing> PhysicalMemory::reusable(const std::shared_ptr<Backing>& backing) {
  return backing.use_count() == 1 && backing->is_own() ? backing : nullptr;
}

void PhysicalMemory::set_device_count(int count) {
  device_count_ = std::clamp(count, 0, kMaxDevices);
  for (int device = 0; device < kMaxDevices; ++device) {
    devices_.try_emplace(device);
  }
}

CUresult PhysicalMemory::open() {
  if (!use_.open()) return CUDA_ERROR_OPERATING_SYSTEM;
  if (host_ == nullptr) host_ = Backing::make("ebbtide-sim-host");
  if (host_ == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  for (int device = 0; device < device_count_; ++device) {
    auto& backing = devices_.at(device).backing;
    if (backing == nullptr) backing = Backing::make("ebbtide-sim-device");
    if (backing == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  }
  return CUDA_SUCCESS;
}

uint64_t PhysicalMemory::free_bytes(int device) {
  const uint64_t used = devices_.at(device).foreign_bytes + use_.total(device);
  return used >= capacity(device) ? 0 : capacity(device) - used;
}

uint64_t PhysicalMemory::device_bytes() {
  uint64_t total = 0;
  for (int device = 0; device < kMaxDevices; ++device) total += use_.own(device);
  return total;
}

CUresult PhysicalMemory::check_location(const CUmemLocation& location) const {
  if (location.type != CU_MEM_LOCATION_TYPE_DEVICE && has(Quirk::kHost)) return CUDA_ERROR_INVALID_VALUE;
  switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return location.id >= 0 && location.id < device_count_ ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST: return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: return location.id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult PhysicalMemory::allocate(uint64_t size, CUmemLocation location, uint64_t id, Block& block) {
  const bool is_on_device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const auto& backing = is_on_device ? devices_.at(location.id).backing : host_;
  if (size > static_cast<uint64_t>(kBackingBytes) - backing->next_offset) return CUDA_ERROR_OUT_OF_MEMORY;
  return make_block(backing, size, location, id, block);
}

CUresult PhysicalMemory::make_block(std::shared_ptr<Backing> backing, uint64_t size, CUmemLocation location,
                                    uint64_t id, Block& block) {
  const bool is_on_device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  const uint64_t number = backing->number;
  if (is_on_device && !use_.take(location.id, size, devices_.at(location.id).foreign_bytes, number))
    return CUDA_ERROR_OUT_OF_MEMORY;
  try {
    block = std::make_shared<PhysicalBlock>(std::move(backing), size, location, id, use_);
  } catch (const std::bad_alloc&) {
    if (is_on_device) use_.give_back(location.id, size, number);
    throw;
  }
  return CUDA_SUCCESS;
}

CUresult PhysicalMemory::create(uint64_t& handle, uint64_t size, const CUmemAllocationProp* prop, uint64_t flags,
                                uint64_t new_id) {
  if (prop == nullptr || flags != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult wrong = check_location(prop->location); wrong != CUDA_SUCCESS) return wrong;
  if (size == 0 || size % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if (has(Quirk::kHandles) && size > kLargestHandleBytes) return CUDA_ERROR_INVALID_VALUE;
  Block block;
  CUresult failed = CUDA_SUCCESS;
  switch (prop->requestedHandleTypes) {
    case CU_MEM_HANDLE_TYPE_NONE: failed = allocate(size, prop->location, new_id, block); break;
    case CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
      failed = allocate_exportable(size, prop->location, new_id, block);
      break;
    case CU_MEM_HANDLE_TYPE_FABRIC: return CUDA_ERROR_NOT_PERMITTED;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  if (failed != CUDA_SUCCESS) return failed;
  retain(block);
  handle = block->id;
  return CUDA_SUCCESS;
}

void PhysicalMemory::retain(const Block& block) {
  ++block->handle_references;
  handles_[block->id] = block;
}

CUresult PhysicalMemory::release(uint64_t handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second->handle_references == 0) handles_.erase(found);
  return CUDA_SUCCESS;
}

Block PhysicalMemory::find(uint64_t handle) const {
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second;
}

namespace {

CUresult granularity_of(size_t* granularity, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags option) {
  if (granularity == nullptr || prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The driver ignores the location here.
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult create_handle(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                       unsigned long long flags) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  uint64_t created = 0;
  const CUresult result = simulator().physical.create(created, size, prop, flags, simulator().next_id());
  if (result == CUDA_SUCCESS) *handle = created;
  return result;
}

CUresult release_handle(CUmemGenericAllocationHandle handle) {
  Lock lock(simulator().mutex);
  return simulator().physical.release(handle);
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                                          CUmemAllocationGranularity_flags option) {
  EBBTIDE_SIM_FORWARD(cuMemGetAllocationGranularity, kDriver, granularity_of, granularity, prop, option);
}

EBBTIDE_SIM_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                                        const CUmemAllocationProp* prop, unsigned long long flags) {
  EBBTIDE_SIM_FORWARD(cuMemCreate, kDriver, create_handle, handle, size, prop, flags);
}

EBBTIDE_SIM_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  EBBTIDE_SIM_FORWARD(cuMemRelease, kDriver, release_handle, handle);
}
