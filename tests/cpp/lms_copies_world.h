#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "lms/copies.h"

// Copies of large model support on a core and memory of their own.
namespace ebbtide::testing {

class CopiesTest : public CoreTest {
 protected:
  using Direction = lms::CopyDirection;

  std::unique_ptr<lms::Copy> to_host(std::byte* on_host, CUdeviceptr on_device, size_t size_bytes, CUstream after,
                                     int device = 0) {
    return copies_->begin(device, on_host, reinterpret_cast<void*>(on_device), size_bytes, Direction::kToHost, after);
  }
  std::unique_ptr<lms::Copy> to_device(CUdeviceptr on_device, const std::byte* on_host, size_t size_bytes,
                                       CUstream after, int device = 0) {
    return copies_->begin(device, reinterpret_cast<void*>(on_device), on_host, size_bytes, Direction::kToDevice, after);
  }

  // Runs a test with work as late as permitted, at once, and in random order.
  static void in_each_mode(const std::function<void()>& test) {
    struct Mode {
      const char* name;
      int mode;
      uint64_t seed;
    };
    for (const Mode& mode : {Mode{"late", EBBTIDE_SIM_LATE, 0}, Mode{"eager", EBBTIDE_SIM_EAGER, 0},
                             Mode{"random 1", EBBTIDE_SIM_RANDOM, 1}, Mode{"random 2", EBBTIDE_SIM_RANDOM, 2},
                             Mode{"random 3", EBBTIDE_SIM_RANDOM, 3}}) {
      SCOPED_TRACE(mode.name);
      sim().set_async(mode.mode, mode.seed);
      test();
    }
    sim().set_async(EBBTIDE_SIM_LATE, 0);
  }

  static void set(CUdeviceptr address, unsigned char value, size_t size_bytes, CUstream stream) {
    check(driver().cuMemsetD8Async(address, value, size_bytes, stream), "cuMemsetD8Async");
  }
  static ::testing::AssertionResult is_all(const void* bytes, unsigned char value, size_t size_bytes) {
    const auto* const begin = static_cast<const unsigned char*>(bytes);
    for (size_t index = 0; index < size_bytes; ++index) {
      if (begin[index] == value) continue;
      return ::testing::AssertionFailure() << "byte " << index << " is " << int{begin[index]} << ", not " << int{value};
    }
    return ::testing::AssertionSuccess();
  }
  static bool is_all_on_device(CUdeviceptr address, unsigned char value, size_t size_bytes) {
    return is_all(reinterpret_cast<const void*>(address), value, size_bytes);
  }

  std::unique_ptr<lms::EvictedMemory> memory_ =
      std::make_unique<lms::EvictedMemory>(core().budgets.host, core().budgets.pinned, core().capture_gate);
  std::unique_ptr<lms::Copies> copies_ = std::make_unique<lms::Copies>(core().capture_gate, *memory_);
};

}  // namespace ebbtide::testing
