#include "sim/host_memory.h"

#include <sys/mman.h>

#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

constexpr unsigned kAllocFlags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
constexpr unsigned kRegisterFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                    CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;

}  // namespace

CUresult HostMemory::allocate(uint64_t& address, uint64_t size, uint64_t context) {
  const uint64_t mapped = round_to_pages(size);
  if (mapped < size) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  address = reinterpret_cast<uint64_t>(memory);
  ranges_[address] = {.size = size, .context = context, .is_registered = false};
  return CUDA_SUCCESS;
}

CUresult HostMemory::free_block(uint64_t address) {
  const auto found = ranges_.find(address);
  if (found == ranges_.end() || found->second.is_registered) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), round_to_pages(found->second.size));
  ranges_.erase(found);
  return CUDA_SUCCESS;
}

CUresult HostMemory::register_range(uint64_t address, uint64_t size, uint64_t context) {
  if (const auto held = find(address); held && !held->second.is_registered) return CUDA_ERROR_INVALID_VALUE;
  const auto next = ranges_.lower_bound(address);
  if (find(address) || (next != ranges_.end() && next->first - address < size)) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  ranges_[address] = {.size = size, .context = context, .is_registered = true};
  return CUDA_SUCCESS;
}

CUresult HostMemory::unregister_range(uint64_t address) {
  const auto found = ranges_.find(address);
  if (found == ranges_.end() || !found->second.is_registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  ranges_.erase(found);
  return CUDA_SUCCESS;
}

void HostMemory::free_of_context(uint64_t context) {
  for (auto next = ranges_.begin(); next != ranges_.end();) {
    const auto current = next++;
    if (context != 0 && current->second.context != context) continue;
    if (current->second.is_registered) {
      ranges_.erase(current);
    } else {
      free_block(current->first);
    }
  }
}

std::optional<std::pair<uint64_t, PinnedRange>> HostMemory::find(uint64_t address) const {
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return std::nullopt;
  --next;
  if (address - next->first >= next->second.size) return std::nullopt;
  return *next;
}

bool HostMemory::holds(uint64_t address, uint64_t size) const {
  const auto range = find(address);
  return range && size <= range->second.size - (address - range->first);
}

bool HostMemory::leaves_registered(uint64_t address, uint64_t size) const {
  const auto range = find(address);
  return range && range->second.is_registered && !holds(address, size);
}

uint64_t HostMemory::allocated_count() const {
  uint64_t count = 0;
  for (const auto& [address, range] : ranges_) count += range.is_registered ? 0 : 1;
  return count;
}

uint64_t HostMemory::allocated_bytes() const {
  uint64_t total = 0;
  for (const auto& [address, range] : ranges_) total += range.is_registered ? 0 : range.size;
  return total;
}

void HostMemory::reset() { free_of_context(0); }

namespace {

CUresult host_alloc(void** pp, size_t bytesize, unsigned int Flags) {
  if (pp == nullptr || (Flags & ~kAllocFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytesize == 0) {
    *pp = nullptr;
    return CUDA_SUCCESS;
  }
  Lock lock(simulator().mutex);
  uint64_t address = 0;
  const CUresult result = simulator().host_memory.allocate(address, bytesize, current_context(lock));
  if (result == CUDA_SUCCESS) *pp = reinterpret_cast<void*>(address);
  return result;
}

CUresult host_alloc_plain(void** pp, size_t bytesize) { return host_alloc(pp, bytesize, 0); }

// Pinned memory has one address for the processor and the devices.
CUresult device_pointer(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  if (pdptr == nullptr || Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const auto address = reinterpret_cast<uint64_t>(p);
  if (!simulator().host_memory.find(address)) return CUDA_ERROR_INVALID_VALUE;
  *pdptr = address;
  return CUDA_SUCCESS;
}

CUresult free_host(void* p) {
  if (p == nullptr) return CUDA_SUCCESS;
  Lock lock(simulator().mutex);
  const auto range = simulator().host_memory.find(reinterpret_cast<uint64_t>(p));
  if (!range || range->first != reinterpret_cast<uint64_t>(p)) return CUDA_ERROR_INVALID_VALUE;
  // The driver waits for the device before it frees pinned memory, because queued copies may still use it.
  simulator().streams.drain(lock, range->second.context);
  return simulator().host_memory.free_block(reinterpret_cast<uint64_t>(p));
}

CUresult host_register(void* p, size_t bytesize, unsigned int Flags) {
  if (p == nullptr || bytesize == 0 || (Flags & ~kRegisterFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const auto address = reinterpret_cast<uint64_t>(p);
  if (simulator().address_space.find_reservation(address)) return CUDA_ERROR_INVALID_VALUE;
  return simulator().host_memory.register_range(address, bytesize, current_context(lock));
}

CUresult host_unregister(void* p) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const auto range = simulator().host_memory.find(reinterpret_cast<uint64_t>(p));
  if (!range) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  if (!range->second.is_registered || range->first != reinterpret_cast<uint64_t>(p)) return CUDA_ERROR_INVALID_VALUE;
  simulator().streams.drain(lock, range->second.context);
  return simulator().host_memory.unregister_range(reinterpret_cast<uint64_t>(p));
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags) {
  EBBTIDE_SIM_FORWARD(cuMemHostAlloc, kContext | kNoCapture, host_alloc, pp, bytesize, Flags);
}

EBBTIDE_SIM_EXPORT CUresult cuMemFreeHost(void* p) {
  EBBTIDE_SIM_FORWARD(cuMemFreeHost, kDriver | kNoCapture, free_host, p);
}

EBBTIDE_SIM_EXPORT CUresult cuMemHostRegister(void* p, size_t bytesize, unsigned int Flags) {
  EBBTIDE_SIM_FORWARD(cuMemHostRegister, kContext | kNoCapture, host_register, p, bytesize, Flags);
}

EBBTIDE_SIM_EXPORT CUresult cuMemHostUnregister(void* p) {
  EBBTIDE_SIM_FORWARD(cuMemHostUnregister, kDriver | kNoCapture, host_unregister, p);
}

// For programs (program_functions.def).
EBBTIDE_SIM_EXPORT CUresult cuMemAllocHost(void** pp, size_t bytesize) {
  EBBTIDE_SIM_FORWARD(cuMemAllocHost, kContext | kNoCapture, host_alloc_plain, pp, bytesize);
}

EBBTIDE_SIM_EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  EBBTIDE_SIM_FORWARD(cuMemHostGetDevicePointer, kContext, device_pointer, pdptr, p, Flags);
}

EBBTIDE_SIM_PLAIN_NAME(cuMemHostRegister);
EBBTIDE_SIM_PLAIN_NAME(cuMemAllocHost);
EBBTIDE_SIM_PLAIN_NAME(cuMemHostGetDevicePointer);
