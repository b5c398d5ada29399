#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/operation/swapped_memory.h"
#include "core/pause/pause.h"
#include "core/resume/resume.h"

// The two moves of a swap. The leaving side hands its device memory to the returning one; both run at the same time.
namespace ebbtide {

// A tag can't leave and come back in one swap. Throws InvalidArgument.
void require_apart(const OperationRequest& request);

class SwapOut final : public Pause {
 public:
  SwapOut(Core& core, const OperationRequest& request) : Pause(core, request) {}
  void prepare(const Allocations& allocations) override;
  // However it ended, the other side does not wait for more.
  void end_device(int device) noexcept override;

  // Opens the way on one device, once the returning side is known: memory for its excess over the leaving side,
  // created now, and a margin so that both directions of the bus begin at once. Throws OutOfMemory.
  void open(int device, const std::vector<HandleKind>& returning);
  SwappedMemory& memory(int device) { return *memory_.at(device); }
  // Memory that was not taken goes back.
  void close() noexcept { memory_.clear(); }

 protected:
  bool hands_over_memory() const override { return true; }
  void release(int device, Backing& backing) override;

 private:
  std::map<int, std::unique_ptr<SwappedMemory>> memory_;  // by device
};

class SwapIn final : public Resume {
 public:
  // leaving outlives it, is prepared before it and settled before it.
  SwapIn(Core& core, const OperationRequest& request, SwapOut& leaving)
      : Resume(core, request, request.resume_tags), leaving_(leaving) {}
  void prepare(const Allocations& allocations) override;
  void settle() noexcept override;

 protected:
  bool takes_over_memory() const override { return true; }
  std::optional<TakenMemory> take_memory(int device, const HandleKind& kind) override;

 private:
  SwapOut& leaving_;
  std::map<int, std::vector<HandleKind>> handles_;  // of the returning side, by device
};

}  // namespace ebbtide
