#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/allocate/allocator.h"
#include "core/operation/operation.h"
#include "core/state/core.h"
#include "core/state/exit.h"
#include "core/state/shortage.h"
#include "sim_control.h"

// Gives each test its own core, on a simulator that was just reset.
namespace ebbtide::testing {

constexpr int kDevices = 2;
constexpr uint64_t kChunk = 2 * kMiB;

struct Live : ebbtide_sim_counts {
  static Live now();
  std::string text() const;
};
bool operator==(const Live& a, const Live& b);
std::ostream& operator<<(std::ostream& out, const Live& live);

class CoreTest : public ::testing::Test {
 protected:
  CoreTest();
  ~CoreTest() override;
  // Ends the core and starts another one on an empty simulator.
  void restart();

  Core& core() { return *core_; }
  // Ends the core. After that, nothing may live in the simulator.
  void expect_no_leak();
  bool may_lose_streams_ = false;  // one that the driver does not take back is lost

  // Fills memory with content that the seed alone determines, and checks it. Both go through the mapping, as a kernel
  // would.
  static void fill(CUdeviceptr address, size_t size_bytes, uint64_t seed);
  static ::testing::AssertionResult holds(CUdeviceptr address, size_t size_bytes, uint64_t seed);
  static ::testing::AssertionResult is_zero(CUdeviceptr address, size_t size_bytes);

  // New memory, as a program that wants zeros has them where the driver gives none.
  static CUdeviceptr written(CUdeviceptr address, size_t size_bytes);

  // Makes an allocation whose chunks have these sizes. Small chunks keep operations of many chunks quick.
  CUdeviceptr alloc_chunks(const std::string& tag, const Policy& policy, int device,
                           const std::vector<uint64_t>& chunk_bytes);
  CUdeviceptr alloc_chunks(const std::string& tag, BackupKind backup, int device,
                           const std::vector<uint64_t>& chunk_bytes) {
    return alloc_chunks(tag, Policy{backup}, device, chunk_bytes);
  }
  CUdeviceptr alloc(const std::string& tag, uint64_t size_bytes, BackupKind backup = BackupKind::kRam, int device = 0) {
    return written(allocate(core(), core().registry.tag(tag), Policy{backup}, device, size_bytes), size_bytes);
  }

  Report pause(const std::vector<std::string>& tags = {}, std::optional<BackupKind> backup = {}) {
    return run(OperationKind::kPause, tags, backup);
  }
  Report resume(const std::vector<std::string>& tags = {}) { return run(OperationKind::kResume, tags, {}); }
  std::unique_ptr<Operation> claim(OperationKind kind, const std::vector<std::string>& tags = {},
                                   std::optional<BackupKind> backup = {}) {
    OperationRequest request;
    request.tags.names = tags;
    request.backup = backup;
    return Operation::claim(core(), kind, std::move(request));
  }

  std::vector<std::string> preview(OperationKind kind, const std::vector<std::string>& tags = {},
                                   bool is_missing_ok = false) {
    OperationRequest request;
    request.tags.names = tags;
    request.tags.is_missing_ok = is_missing_ok;
    return Operation::preview(core(), kind, std::move(request));
  }

  bool is_partial(const std::string& tag);
  uint64_t resident_bytes(const std::string& tag);
  size_t allocation_count();
  Amounts amounts(const std::string& tag);
  // The parts add up to the size.
  static ::testing::AssertionResult has_every_byte_once(const Amounts& amounts);
  Place place_of(CUdeviceptr address) {
    return core().registry.find(address)->chunk_at(address - core().registry.find(address)->address()).place.load();
  }

 private:
  Report run(OperationKind kind, const std::vector<std::string>& tags, std::optional<BackupKind> backup) {
    return claim(kind, tags, backup)->commit().front();
  }
  void end_core();
  void expect_right_amounts();

  std::unique_ptr<Core> core_;
};

}  // namespace ebbtide::testing
