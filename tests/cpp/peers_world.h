#pragma once

#include "base/error.h"
#include "driver/context.h"
#include "driver/driver.h"
#include "driver/stream.h"
#include "overflow_world.h"

// Two devices, both alive, that can access each other's memory.
namespace ebbtide::testing {

class PeersWorld : public OverflowWorld {
 protected:
  static void set_alive(int device, bool is_alive) {
    CUcontext context = nullptr;
    check(is_alive ? driver().cuDevicePrimaryCtxRetain(&context, device) : driver().cuDevicePrimaryCtxRelease(device),
          "a primary context");
  }
  // A world in which device 1 is not in use yet.
  void start_with_one() {
    start();
    set_alive(1, false);
  }

  // The access to every resident chunk of the allocation, as the driver reports it.
  bool is_usable_by(int device, CUdeviceptr address) {
    const auto allocation = core().registry.find(address);
    bool is_usable = true;
    for (const Chunk& chunk : allocation->chunks) {
      if (!chunk.is_resident()) continue;
      unsigned long long flags = 0;
      const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, device};
      check(driver().cuMemGetAccess(&flags, &location, address + chunk.offset), "cuMemGetAccess");
      is_usable &= flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    return is_usable;
  }
  bool is_usable_by_all(CUdeviceptr address) { return is_usable_by(0, address) && is_usable_by(1, address); }

  // As torch does it: in a stream of the source's device.
  void copy_to(CUdeviceptr to, CUdeviceptr from, size_t size_bytes, int device) {
    const ContextScope scope(device);
    const Stream stream = Stream::create();
    check(driver().cuMemcpyDtoDAsync(to, from, size_bytes, stream.get()), "cuMemcpyDtoDAsync");
    stream.synchronize();
  }
};

}  // namespace ebbtide::testing
