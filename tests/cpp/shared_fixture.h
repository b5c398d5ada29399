#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/move/relocations.h"
#include "core_fixture.h"

// Adjacent allocations, which come back behind one handle.
namespace ebbtide::testing {

class SharedTest : public CoreTest {
 protected:
  // Makes this many allocations of size_bytes, each with its own bytes.
  std::vector<CUdeviceptr> make(const std::string& tag, size_t count, const Policy& policy = {BackupKind::kRam},
                                int device = 0, uint64_t size_bytes = kChunk) {
    std::vector<CUdeviceptr> made;
    for (size_t index = 0; index < count; ++index) {
      made.push_back(written(allocate(core(), core().registry.tag(tag), policy, device, size_bytes), size_bytes));
      write(made.back(), size_bytes);
    }
    return made;
  }
  void write(CUdeviceptr address, uint64_t size_bytes) {
    written_[address] = {size_bytes, ++last_seed_};
    fill(address, size_bytes, last_seed_);
  }
  ::testing::AssertionResult is_whole(CUdeviceptr address) {
    const auto [size_bytes, seed] = written_.at(address);
    return holds(address, size_bytes, seed);
  }
  void expect_whole(const std::vector<CUdeviceptr>& addresses) {
    for (const CUdeviceptr address : addresses) EXPECT_TRUE(is_whole(address));
  }

  void come_back(const std::vector<std::string>& tags = {}) {
    pause(tags);
    resume(tags);
  }
  Report run_at(OperationKind kind, const std::vector<std::string>& tags, const std::vector<CUdeviceptr>& addresses) {
    OperationRequest request;
    request.tags.names = tags;
    request.tags.addresses = addresses;
    return Operation::claim(core(), kind, std::move(request))->commit().front();
  }
  Report separate(const std::vector<CUdeviceptr>& addresses, const std::vector<std::string>& tags = {"w"}) {
    return run_at(OperationKind::kSeparate, tags, addresses);
  }
  Report trim(const std::vector<CUdeviceptr>& addresses, const std::vector<std::string>& tags = {"w"}) {
    return run_at(OperationKind::kTrim, tags, addresses);
  }
  // Also those that no allocation begins at.
  bool is_any_shared(const std::vector<CUdeviceptr>& addresses) {
    Allocations allocations;
    for (const CUdeviceptr address : addresses) {
      auto found = core().registry.find(address);
      if (found != nullptr && found->address() == address) allocations.push_back(std::move(found));
    }
    return ebbtide::is_any_shared(allocations);
  }
  std::vector<Report> swap(const std::vector<std::string>& leaving, const std::vector<std::string>& returning) {
    OperationRequest request;
    request.tags.names = leaving;
    request.resume_tags.names = returning;
    return Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  }
  std::unique_ptr<Operation> claim_in_order(const std::vector<CUdeviceptr>& first) {
    OperationRequest request;
    for (const CUdeviceptr address : first) request.order.push_back({address, 8});
    return Operation::claim(core(), OperationKind::kResume, std::move(request));
  }

  // Physical memory, as the budgets and the driver count it.
  void expect_device_bytes(uint64_t size_bytes, int device = 0) {
    EXPECT_EQ(core().budgets.device.held_bytes(device), size_bytes);
    uint64_t all_bytes = 0;
    for (int each = 0; each < kDevices; ++each) all_bytes += core().budgets.device.held_bytes(each);
    EXPECT_EQ(Live::now().device_bytes, all_bytes);
  }
  static uint64_t handles() {
    EXPECT_EQ(Live::now().handles, Live::now().mappings);
    return Live::now().handles;
  }
  void free_all(const std::vector<CUdeviceptr>& addresses) {
    for (const CUdeviceptr address : addresses) deallocate(core(), address);
  }

 private:
  std::map<CUdeviceptr, std::pair<uint64_t, uint64_t>> written_;  // size and seed
  uint64_t last_seed_ = 0;
};

}  // namespace ebbtide::testing
