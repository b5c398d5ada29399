#include "torch/lms/device_side.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <chrono>

#include "api/ebbtide.h"
#include "torch/lms/cuda_side.h"
#include "torch/lms/optimizer_states.h"
#include "torch/lms/packed.h"
#include "torch/lms/weights.h"

namespace ebbtide::lms {
namespace {

SimulatedHooks hooks{};

// CPU tensors. Their work is the processor's own, in no stream: so the thread waits for a copy.
class SimulatedSide final : public DeviceSide {
 public:
  c10::Device current_device() const override { return c10::DeviceType::CPU; }
  int number_of(c10::Device /*device*/) const override { return 0; }

  c10::Stream current_stream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(device.type(), 0));
  }

  c10::Stream copying_stream(c10::Device device) const override { return current_stream(device); }
  void* handle_of(c10::Stream /*stream*/) const override { return nullptr; }

  double come_after(OwnedCopy& copy, c10::Stream /*stream*/) const override {
    const auto begin = std::chrono::steady_clock::now();
    copy.wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  TimeMark mark(c10::Device /*device*/, double host_seconds) const override { return TimeMark(host_seconds); }

  c10::DataPtr allocate(c10::Device /*device*/, size_t size_bytes) const override {
    c10::DataPtr data;
    hooks.allocate(size_bytes, &data);
    return data;
  }

  bool is_on_device(const void* address) const override {
    bool is_found = false;
    ebbtide_allocation_info info{};
    return ebbtide_find(address, &is_found, &info, nullptr) == EBBTIDE_OK && is_found;
  }

  void let_go(c10::Storage /*storage*/, c10::Stream /*stream*/) const noexcept override {}

  Usage usage(c10::Device /*device*/) const override { return {.bytes = hooks.used_bytes()}; }
  uint64_t elsewhere_bytes(c10::Device /*device*/) const override {
    return OptimizerStates::host_bytes() + Weights::host_bytes() + overflow_memory.query().host_bytes;
  }
  uint64_t held_bytes(c10::Device /*device*/) const override { return query().held_bytes; }
  void release_cached(c10::Device /*device*/) const noexcept override { hooks.release_cached(); }

  uint64_t limit_bytes(c10::Device /*device*/) const override {
    const ebbtide_device_info info = query();
    return std::min<uint64_t>(info.limit_bytes, info.total_bytes);
  }

  void balance() const noexcept override {}  // one limit, ebbtide's, counts all

 private:
  static ebbtide_device_info query() {
    ebbtide_device_info info{};
    ebbtide_query_device(0, &info, nullptr);
    return info;
  }
};

}  // namespace

TimeMark::TimeMark(c10::Stream stream)
    : event_(std::make_shared<c10::Event>(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT)) {
  event_->record(stream);
}

void TimeMark::wait() const {
  if (event_) event_->synchronize();
}

void TimeMark::come_before(c10::Stream stream) const {
  if (event_) event_->block(stream);
}

double TimeMark::seconds_since(const TimeMark& before) const {
  if (event_ && before.event_) return before.event_->elapsedTime(*event_) / 1e3;
  return seconds_ - before.seconds_;
}

void set_simulated_hooks(const SimulatedHooks& given) { hooks = given; }

c10::Device device_now() { return side_of(rules().device_type.load()).current_device(); }

DeviceSide& side_of(c10::Device device) {
  if (device.is_cuda()) return cuda_side();
  static SimulatedSide& simulated = *new SimulatedSide();
  return simulated;
}

}  // namespace ebbtide::lms
