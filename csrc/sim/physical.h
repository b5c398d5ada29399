// Physical memory: blocks of a sparse file.
//
// - Every device has one memfd, and the host has another. Fresh memory reads as zeros, as on the real device. A block's
//   pages go when its last holder (a handle, a mapping, a running copy) releases it. Some of them are kept, and cleared
//   when a block of that size is made: the system takes ten times as long to give new ones.
// - A block that other processes may import has a file of its own, which is what they get. Its pages go with the last
//   descriptor and mapping, wherever these are.
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

#include "sim/device_use.h"

namespace ebbtide::sim {

constexpr uint64_t kGranularity = 2 << 20;

// A memfd of this length, also beyond the soft limit on the size of files; -1 where the system refuses.
int make_memory_file(const char* name, off_t bytes);

struct Backing {
  static std::shared_ptr<Backing> make(const char* name);
  // number: 0, or what names a file that has one block.
  explicit Backing(int file, uint64_t number = 0);
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Where the pages of a new block lie, all of them zeros.
  uint64_t take(uint64_t size_bytes);
  void give_back(uint64_t offset, uint64_t size_bytes) noexcept;
  // Whether it is not the parent's of this process.
  bool is_own() const;

  const int fd;
  const uint64_t number;
  uint64_t next_offset = 0;

 private:
  std::mutex mutex_;                        // a copy gives back without the simulator's lock
  std::multimap<uint64_t, uint64_t> kept_;  // offsets, by size
  uint64_t kept_bytes_ = 0;
  const pid_t owner_;
};

struct PhysicalBlock {
  // `use` counts it already, if it is on a device.
  PhysicalBlock(std::shared_ptr<Backing> file, uint64_t size_bytes, CUmemLocation where, uint64_t handle,
                DeviceUse& use);
  // The same memory under another handle: what an import gives where the block is here already.
  PhysicalBlock(std::shared_ptr<PhysicalBlock> block, uint64_t handle);
  ~PhysicalBlock();
  PhysicalBlock(const PhysicalBlock&) = delete;
  PhysicalBlock& operator=(const PhysicalBlock&) = delete;

  bool is_on_device() const { return location.type == CU_MEM_LOCATION_TYPE_DEVICE; }
  bool is_exportable() const { return backing->number != 0 && !is_imported; }

  const std::shared_ptr<PhysicalBlock> first;  // which is counted; null if this is it
  const std::shared_ptr<Backing> backing;
  const uint64_t offset;
  const uint64_t size;
  const CUmemLocation location;
  const uint64_t id;
  uint64_t handle_references = 0;
  bool is_imported = false;

 private:
  DeviceUse& use_;
};

using Block = std::shared_ptr<PhysicalBlock>;

class PhysicalMemory {
 public:
  PhysicalMemory();

  // Opens the files of the host and of all devices, and the table of what is in use. Returns
  // CUDA_ERROR_OPERATING_SYSTEM if that fails.
  CUresult open();
  // Makes a block without a handle. Checks the capacity, not the size.
  CUresult allocate(uint64_t size, CUmemLocation location, uint64_t id, Block& block);

  CUresult create(uint64_t& handle, uint64_t size, const CUmemAllocationProp* prop, uint64_t flags, uint64_t new_id);
  CUresult release(uint64_t handle);
  // A descriptor of the block's own file, which the caller closes.
  CUresult export_file(int& file, uint64_t handle);
  // A handle of its own for the block in such a file. `file` stays the caller's. CUDA_ERROR_UNKNOWN for another file.
  CUresult import_file(uint64_t& handle, int file, uint64_t new_id);
  void retain(const Block& block);
  Block find(uint64_t handle) const;
  CUresult check_location(const CUmemLocation& location) const;

  // Names the devices among those of all processes.
  DeviceUse::Owner owner() const { return use_.owner(); }
  int device_count() const { return device_count_; }
  bool has_device(int device) const { return device >= 0 && device < device_count_; }
  void set_device_count(int count);
  void set_capacity(int device, uint64_t bytes) { use_.set_capacity(device, bytes); }
  void set_foreign_bytes(int device, uint64_t bytes) { devices_[device].foreign_bytes = bytes; }
  uint64_t capacity(int device) const { return use_.capacity(device); }
  uint64_t free_bytes(int device);
  // Of all devices, that this process holds.
  uint64_t device_bytes();
  uint64_t handle_count() const { return handles_.size(); }
  // Releases every handle and reads the environment again.
  void reset();

 private:
  struct Device {
    uint64_t foreign_bytes = 0;
    std::shared_ptr<Backing> backing;
  };

  static std::shared_ptr<Backing> reusable(const std::shared_ptr<Backing>& backing);
  CUresult allocate_exportable(uint64_t size, CUmemLocation location, uint64_t id, Block& block);
  // Counts it.
  CUresult make_block(std::shared_ptr<Backing> backing, uint64_t size, CUmemLocation location, uint64_t id,
                      Block& block);
  void note_exportable(const Block& block);

  int device_count_ = 1;
  DeviceUse use_;  // outlives all blocks
  std::map<int, Device> devices_;
  std::shared_ptr<Backing> host_;
  std::map<uint64_t, Block> handles_;
  std::map<uint64_t, std::weak_ptr<PhysicalBlock>> exportable_;  // by the number of their file
};

}  // namespace ebbtide::sim
