// Physical memory: blocks of a sparse file.
//
// - Every device has one memfd, and the host has another. Fresh memory reads as zeros, as on the real device. A block's
//   pages go when its last holder (a handle, a mapping, a running copy) releases it. Some of them are kept, and cleared
//   when a block of that size is made: the system takes ten times as long to give new ones.
// - Bytes are moved with pread and pwrite, never through an address, so no copy can fault, whatever is mapped
//   meanwhile.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace ebbtide::sim {

constexpr uint64_t kGranularity = 2 << 20;
constexpr uint64_t kDefaultCapacity = 1ull << 30;
constexpr int kMaxDevices = 64;

struct Backing {
  static std::shared_ptr<Backing> make(const char* name);
  explicit Backing(int file);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Where the pages of a new block lie, all of them zeros.
  uint64_t take(uint64_t size_bytes);
  void give_back(uint64_t offset, uint64_t size_bytes) noexcept;
  // Whether it is not the parent's of this process.
  bool is_own() const;

  const int fd;
  uint64_t next_offset = 0;
  std::atomic<uint64_t> used_bytes{0};

 private:
  std::mutex mutex_;                        // a copy gives back without the simulator's lock
  std::multimap<uint64_t, uint64_t> kept_;  // offsets, by size
  uint64_t kept_bytes_ = 0;
  const pid_t owner_;
};

struct PhysicalBlock {
  PhysicalBlock(std::shared_ptr<Backing> file, uint64_t size_bytes, CUmemLocation where, uint64_t handle);
  ~PhysicalBlock();
  PhysicalBlock(const PhysicalBlock&) = delete;
  PhysicalBlock& operator=(const PhysicalBlock&) = delete;

  bool is_on_device() const { return location.type == CU_MEM_LOCATION_TYPE_DEVICE; }

  const std::shared_ptr<Backing> backing;
  const uint64_t offset;
  const uint64_t size;
  const CUmemLocation location;
  const uint64_t id;
  uint64_t handle_references = 0;
};

using Block = std::shared_ptr<PhysicalBlock>;

class PhysicalMemory {
 public:
  PhysicalMemory();

  // Opens the files of the host and of all devices. Returns CUDA_ERROR_OPERATING_SYSTEM if that fails.
  CUresult open();
  // Makes a block without a handle. Checks the capacity, not the size.
  CUresult allocate(uint64_t size, CUmemLocation location, uint64_t id, Block& block);

  CUresult create(uint64_t& handle, uint64_t size, const CUmemAllocationProp* prop, uint64_t flags, uint64_t new_id);
  CUresult release(uint64_t handle);
  void retain(const Block& block);
  Block find(uint64_t handle) const;
  CUresult check_location(const CUmemLocation& location) const;

  int device_count() const { return device_count_; }
  bool has_device(int device) const { return device >= 0 && device < device_count_; }
  void set_device_count(int count);
  void set_capacity(int device, uint64_t bytes) { devices_[device].capacity = bytes; }
  void set_foreign_bytes(int device, uint64_t bytes) { devices_[device].foreign_bytes = bytes; }
  uint64_t capacity(int device) const;
  uint64_t free_bytes(int device) const;
  uint64_t device_bytes() const;
  uint64_t handle_count() const { return handles_.size(); }
  // Releases every handle and reads the environment again.
  void reset();

 private:
  struct Device {
    uint64_t capacity;
    uint64_t foreign_bytes = 0;
    std::shared_ptr<Backing> backing;
  };

  static std::shared_ptr<Backing> reusable(const std::shared_ptr<Backing>& backing);

  int device_count_ = 1;
  std::map<int, Device> devices_;
  std::shared_ptr<Backing> host_;
  std::map<uint64_t, Block> handles_;
};

}  // namespace ebbtide::sim
