// Kernel launches. The kernels of csrc/kernels run on the CPU, each as an item of a stream. Any other entry of a module
// can be looked up, but its launch is refused.
//
// The driver does not interpret a kernel's pointers. They are looked up when the kernel runs, block after block. A bad
// pointer becomes the context's sticky error; the blocks before it are done.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/log.h"
#include "kernels/blocks.h"
#include "sim/entry.h"
#include "sim/rules.h"
#include "sim/simulator.h"
#include "sim/spans.h"

namespace ebbtide::sim {
namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxSharedBytes = 48 << 10;

struct Dimensions {
  unsigned x, y, z;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

// The memory that a kernel on `device` can access.
class DeviceMemory {
 public:
  DeviceMemory(Lock& lock, int device) : lock_(lock), device_(device) {}

  bool read(uint64_t from, void* to, uint64_t size) const { return move(from, to, size, AccessKind::kRead); }
  bool write(uint64_t to, void* from, uint64_t size) const { return move(to, from, size, AccessKind::kWrite); }
  bool read_word(uint64_t from, uint32_t& value) const {
    const auto number = read_number(lock_, from, device_);
    value = number.value_or(0);
    return number.has_value();
  }
  bool write_word(uint64_t to, uint32_t value) const { return write_number(lock_, to, value, device_); }
  Lock& lock() const { return lock_; }

 private:
  bool move(uint64_t address, void* own, uint64_t size, AccessKind kind) const {
    const auto theirs = resolve(lock_, {address, true}, size, kind, device_);
    if (!theirs) return false;
    const Spans ours{{nullptr, reinterpret_cast<uint64_t>(own), size}};
    const Unlocked unlocked(lock_);
    return kind == AccessKind::kRead ? move_bytes(ours, *theirs, size) : move_bytes(*theirs, ours, size);
  }

  Lock& lock_;
  int device_;
};

struct DigestLaunch {
  uint64_t addresses;
  uint64_t reports;
  kernels::Digest seed;
  uint32_t count;
  uint32_t rows;  // 1, or a CTA for each section

  CUresult run(const DeviceMemory& memory, uint32_t index) const {
    uint64_t address = 0;
    if (!memory.read(addresses + index * sizeof address, &address, sizeof address)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (address % sizeof(kernels::Value) != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
    std::vector<std::byte> block(kernels::kBlockBytes);
    if (!memory.read(address, block.data(), block.size())) return CUDA_ERROR_ILLEGAL_ADDRESS;
    std::vector<kernels::BlockReport> found(rows);
    {
      const Unlocked unlocked(memory.lock());
      for (uint32_t row = 0; row < rows; ++row)
        found[row] =
            rows == 1 ? kernels::digest_block(block.data(), seed) : kernels::digest_section(block.data(), row, seed);
    }
    const size_t bytes = found.size() * sizeof found[0];
    const bool is_written = memory.write(reports + index * bytes, found.data(), bytes);
    return is_written ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
  }
};

struct FillLaunch {
  uint64_t fills;
  uint32_t count;

  CUresult run(const DeviceMemory& memory, uint32_t index) const {
    kernels::BlockFill fill;
    if (!memory.read(fills + index * sizeof fill, &fill, sizeof fill)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (fill.address % sizeof(kernels::Value) != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
    std::vector<std::byte> block(kernels::kBlockBytes);
    {
      const Unlocked unlocked(memory.lock());
      kernels::fill_block(block.data(), fill.value);
    }
    return memory.write(fill.address, block.data(), block.size()) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
  }
};

// The lanes advance in turn, one piece each. A lane that waits for a slot releases the lock.
struct DeliverLaunch {
  uint64_t pieces;
  uint64_t slots;
  uint64_t board;
  uint64_t slot_bytes;
  uint32_t lane_slots;
  uint32_t count;

  CUresult run(const DeviceMemory& memory) const {
    bool is_given_up = false;
    for (uint32_t index = 0; index < count && !is_given_up; ++index) {
      if (const CUresult failed = bring(memory, index, is_given_up); failed != CUDA_SUCCESS) return failed;
    }
    for (uint32_t lane = 0; lane < kernels::kLanes; ++lane) {
      uint32_t base = 0;
      if (!memory.read_word(word(lane, kernels::kBase), base)) return CUDA_ERROR_ILLEGAL_ADDRESS;
      const uint32_t all = (count + kernels::kLanes - 1 - lane) / kernels::kLanes;
      if (!memory.write_word(word(lane, kernels::kGate), base + all)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    return CUDA_SUCCESS;
  }

 private:
  uint64_t word(uint32_t lane, uint32_t which) const {
    return board + sizeof(uint32_t) * (kernels::kLaneWords * (1 + lane) + which);
  }
  CUresult bring(const DeviceMemory& memory, uint32_t index, bool& is_given_up) const {
    kernels::Piece piece;
    if (!memory.read(pieces + index * sizeof piece, &piece, sizeof piece)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (piece.target % sizeof(kernels::Value) != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
    if (piece.size_bytes % kernels::kPieceUnit != 0) return CUDA_ERROR_INVALID_VALUE;
    const uint32_t lane = index % kernels::kLanes;
    const uint32_t number = index / kernels::kLanes + 1;
    if (!await_slot(memory, piece, lane, number, is_given_up)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (is_given_up) return CUDA_SUCCESS;
    {
      const Unlocked unlocked(memory.lock());
      const Verdict verdict = rules().count_step(kernels::kDeliverEntry);
      std::this_thread::sleep_for(std::chrono::microseconds(verdict.delay_us));
      if (verdict.failure) return *verdict.failure;
    }
    uint32_t base = 0;
    const bool is_there = move(memory, piece, lane, number) && memory.write_word(word(lane, kernels::kDone), number) &&
                          memory.read_word(word(lane, kernels::kBase), base) &&
                          memory.write_word(word(lane, kernels::kGate), base + number);
    return is_there ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
  }

  bool await_slot(const DeviceMemory& memory, const kernels::Piece& piece, uint32_t lane, uint32_t number,
                  bool& is_given_up) const {
    const uint64_t filled = word(lane, kernels::kFirstFilled + (number - 1) % lane_slots);
    while (true) {
      uint32_t given_up = 0, held = 0;
      if (!memory.read_word(board, given_up) || !memory.read_word(filled, held)) return false;
      is_given_up = given_up != 0;
      if (is_given_up || piece.source != kernels::kFromSlot || held == number) return true;
      const Unlocked unlocked(memory.lock());
      std::this_thread::sleep_for(kSlotPoll);
    }
  }

  bool move(const DeviceMemory& memory, const kernels::Piece& piece, uint32_t lane, uint32_t number) const {
    std::vector<std::byte> bytes(piece.size_bytes);
    if (piece.source == kernels::kFromValue) {
      const Unlocked unlocked(memory.lock());
      for (size_t done = 0; done < bytes.size(); done += sizeof piece.value)
        std::memcpy(bytes.data() + done, &piece.value, sizeof piece.value);
    } else {
      const uint64_t slot = slots + slot_bytes * (lane * lane_slots + (number - 1) % lane_slots);
      const uint64_t source = piece.source == kernels::kFromSlot ? slot : piece.source;
      if (!memory.read(source, bytes.data(), bytes.size())) return false;
    }
    return memory.write(piece.target, bytes.data(), bytes.size());
  }

  static constexpr std::chrono::microseconds kSlotPoll{20};
};

template <typename Launch>
Work work_of(const Launch& launch, unsigned grid, int device) {
  return [launch, grid, device](Lock& lock) {
    const DeviceMemory memory(lock, device);
    for (uint32_t index = 0; index < std::min(grid, launch.count); ++index) {
      if (const CUresult failed = launch.run(memory, index); failed != CUDA_SUCCESS) return failed;
    }
    return CUDA_SUCCESS;
  };
}

template <typename T>
T parameter(void** parameters, int index) {
  return *static_cast<const T*>(parameters[index]);
}

// The work of an entry that the simulator knows, with these parameters, which are read now.
Work make_work(const std::string& entry, void** parameters, const Dimensions& grid, int device) {
  if (entry == kernels::kDigestEntry) {
    const DigestLaunch launch{parameter<uint64_t>(parameters, 0),
                              parameter<uint64_t>(parameters, 1),
                              {parameter<uint64_t>(parameters, 2), parameter<uint64_t>(parameters, 3)},
                              parameter<uint32_t>(parameters, 4),
                              grid.y};
    return work_of(launch, grid.x, device);
  }
  if (entry == kernels::kFillEntry) {
    return work_of(FillLaunch{parameter<uint64_t>(parameters, 0), parameter<uint32_t>(parameters, 1)}, grid.x, device);
  }
  const DeliverLaunch launch{parameter<uint64_t>(parameters, 0), parameter<uint64_t>(parameters, 1),
                             parameter<uint64_t>(parameters, 2), parameter<uint64_t>(parameters, 3),
                             parameter<uint32_t>(parameters, 4), parameter<uint32_t>(parameters, 5)};
  return [launch, device](Lock& lock) {
    return launch.count == 0 ? CUDA_SUCCESS : launch.run(DeviceMemory(lock, device));
  };
}

bool is_known(const std::string& entry) {
  return entry == kernels::kDigestEntry || entry == kernels::kFillEntry || entry == kernels::kDeliverEntry;
}

void say_unknown(const std::string& entry) {
  static std::atomic<bool> is_said{false};
  if (is_said.exchange(true)) return;
  log_line(LogLevel::kWarning, {"the simulated device runs no kernels of programs: it refuses to launch ", entry,
                                ", as not supported (801), and every other"});
}

bool may_be_launched(const Dimensions& grid, const Dimensions& block, unsigned shared_bytes) {
  if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 || shared_bytes > kMaxSharedBytes) return false;
  return grid.count() > 0 && block.count() > 0 && block.count() <= kMaxThreads && block.z <= 64;
}

CUresult launch_kernel(CUfunction f, unsigned gridDimX, unsigned gridDimY, unsigned gridDimZ, unsigned blockDimX,
                       unsigned blockDimY, unsigned blockDimZ, unsigned sharedMemBytes, CUstream hStream,
                       void** kernelParams, void** extra) {
  const Dimensions grid{gridDimX, gridDimY, gridDimZ}, block{blockDimX, blockDimY, blockDimZ};
  Lock lock(simulator().mutex);
  const Function* function = simulator().modules.find(id_of(f));
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  StreamRef stream;
  if (const CUresult wrong = simulator().streams.find(lock, hStream, stream); wrong != CUDA_SUCCESS) return wrong;
  if (function->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  if (!may_be_launched(grid, block, sharedMemBytes)) return CUDA_ERROR_INVALID_VALUE;
  if (!is_known(function->entry)) {
    say_unknown(function->entry);
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  // A device would run these kernels with any number of threads or CTAs, and compute nonsense.
  if (kernelParams == nullptr || block.x != kernels::kThreads || block.count() != kernels::kThreads) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (function->entry == kernels::kDeliverEntry && grid.x != kernels::kLanes) return CUDA_ERROR_INVALID_VALUE;
  const bool is_by_section = function->entry == kernels::kDigestEntry && grid.y == kernels::kSections;
  if (grid.z != 1 || (grid.y != 1 && !is_by_section)) return CUDA_ERROR_INVALID_VALUE;
  Work work = make_work(function->entry, kernelParams, grid, device_of_context(lock, stream->context));
  return simulator().streams.submit(lock, stream, std::move(work));
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                           unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                           unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                           void** kernelParams, void** extra) {
  EBBTIDE_SIM_FORWARD(cuLaunchKernel, kContext, launch_kernel, f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY,
                      blockDimZ, sharedMemBytes, hStream, kernelParams, extra);
}
