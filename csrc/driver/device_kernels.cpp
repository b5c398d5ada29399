#include "driver/device_kernels.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

#include "base/error.h"
#include "base/log.h"
#include "base/scope_exit.h"
#include "driver/context.h"
#include "driver/stream.h"

namespace ebbtide {

// Only of() takes the lock, so that driver calls made under it never block malloc. Leaked, because kernels may be
// requested at any time.
struct DeviceKernels::Slot {
  std::mutex mutex;
  std::atomic<const DeviceKernels*> loaded{nullptr};
  bool is_hopeless = false;
  bool is_reported = false;
};

namespace {

// The driver or the device will never take this image.
bool is_final(CUresult result) {
  switch (result) {
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_NOT_SUPPORTED: return true;
    default: return false;
  }
}

CUfunction function_of(CUmodule module, const char* entry) {
  CUfunction function = nullptr;
  check(driver().cuModuleGetFunction(&function, module, entry), "cuModuleGetFunction", std::string("name=") + entry);
  return function;
}

void unload(CUmodule module) noexcept {
  const CUresult result = driver_if_loaded()->cuModuleUnload(module);
  if (!is_undone(result)) log_line(LogLevel::kInfo, {"cuModuleUnload failed with ", result_name(result)});
}

// With a grid of at least one, for a launch with nothing to do.
void launch(CUfunction function, const char* entry, CUstream stream, uint32_t count, void** parameters,
            uint32_t rows = 1) {
  const uint32_t grid = std::max(count, 1u);
  check(driver().cuLaunchKernel(function, grid, rows, 1, kernels::kThreads, 1, 1, 0, stream, parameters, nullptr),
        "cuLaunchKernel", std::string("function=") + entry + ", grid=" + std::to_string(grid));
}

}  // namespace

DeviceKernels::Slot& DeviceKernels::slot_of(int device) {
  static Slot* const slots = new Slot[kMaxDevices];
  return slots[device_index(device)];
}

const DeviceKernels* DeviceKernels::load(Slot& slot, int device) {
  try {
    const ContextScope scope(device);
    CUmodule module = nullptr;
    const CUresult result = driver().cuModuleLoadData(&module, speaks_hip() ? kernels::code_objects() : kernels::ptx());
    check(result, "cuModuleLoadData", speaks_hip() ? "image=the kernels' code objects" : "image=the kernels' PTX");
    ScopeExit undo([&] { unload(module); });
    auto loaded = std::unique_ptr<DeviceKernels>(new DeviceKernels(function_of(module, kernels::kDigestEntry),
                                                                   function_of(module, kernels::kFillEntry),
                                                                   function_of(module, kernels::kDeliverEntry)));
    loaded->launch_with_nothing();
    undo.dismiss();
    return loaded.release();
  } catch (const DriverError& error) {
    slot.is_hopeless = is_final(static_cast<CUresult>(error.code));
    throw;
  }
}

const DeviceKernels* DeviceKernels::of(int device) noexcept try {
  Slot& slot = slot_of(device);
  if (const DeviceKernels* loaded = slot.loaded.load(std::memory_order_acquire)) return loaded;
  const std::lock_guard lock(slot.mutex);
  if (slot.is_hopeless) return nullptr;
  if (const DeviceKernels* loaded = slot.loaded.load()) return loaded;
  try {
    const DeviceKernels* loaded = load(slot, device);
    slot.loaded.store(loaded, std::memory_order_release);
    return loaded;
  } catch (const std::exception& error) {
    if (!slot.is_reported) {
      log_line(
          LogLevel::kWarning,
          {"the kernels can't be loaded, every block is copied and every resume waits for its bytes: ", error.what()});
    }
    slot.is_reported = true;
    return nullptr;
  }
} catch (...) {
  return nullptr;
}

void DeviceKernels::digest(CUstream stream, const uint64_t* addresses, kernels::BlockReport* reports,
                           kernels::Digest seed, uint32_t count, uint32_t sections) const {
  void* parameters[] = {static_cast<void*>(&addresses), static_cast<void*>(&reports), &seed.low, &seed.high, &count};
  launch(digest_, kernels::kDigestEntry, stream, count, parameters, sections);
}

void DeviceKernels::fill(CUstream stream, const kernels::BlockFill* fills, uint32_t count) const {
  void* parameters[] = {static_cast<void*>(&fills), &count};
  launch(fill_, kernels::kFillEntry, stream, count, parameters);
}

void DeviceKernels::deliver(CUstream stream, const kernels::Piece* pieces, const std::byte* slots, uint32_t* board,
                            uint64_t slot_bytes, uint32_t lane_slots, uint32_t count) const {
  void* parameters[] = {static_cast<void*>(&pieces),
                        static_cast<void*>(&slots),
                        static_cast<void*>(&board),
                        &slot_bytes,
                        &lane_slots,
                        &count};
  launch(deliver_, kernels::kDeliverEntry, stream, kernels::kLanes, parameters);
}

// The driver may load a function at its first launch, and wait for the device to do so. A delivery must not be launched
// for the first time while streams wait for another one, so each function is launched here.
void DeviceKernels::launch_with_nothing() const {
  const Stream stream = Stream::create();
  digest(stream.get(), nullptr, nullptr, {}, 0);
  fill(stream.get(), nullptr, 0);
  deliver(stream.get(), nullptr, nullptr, nullptr, 0, 1, 0);
  stream.synchronize();
}

void DeviceKernels::forget_all() noexcept {
  for (int device = 0; device < kMaxDevices; ++device) {
    Slot& slot = slot_of(device);
    const std::lock_guard lock(slot.mutex);
    delete slot.loaded.exchange(nullptr);
    slot.is_hopeless = slot.is_reported = false;
  }
}

}  // namespace ebbtide
