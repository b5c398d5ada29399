#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/pause/pause.h"

namespace ebbtide {

// Who gets the memory of a pause, in another process. Called by the threads of the pause, one for each device.
struct Receiver {
  std::function<bool(int device, uint64_t size_bytes)> wants;
  // The descriptor is the caller's. False: the receiver is gone.
  std::function<bool(int device, uint64_t size_bytes, int file)> give;
  std::function<void(int device, uint64_t size_bytes)> note_released;
};

// A pause that hands its device memory to another process, handle by handle. What that does not want, or can't get, is
// released, and it is told so.
class Outgoing final : public Pause {
 public:
  Outgoing(Core& core, const OperationRequest& request, const Receiver& receiver)
      : Pause(core, request), receiver_(receiver) {}

 protected:
  bool hands_over_memory() const override { return true; }
  void release(int device, Backing& backing) override;

 private:
  Descriptor try_export(int device, const PhysicalMemory& memory) noexcept;

  const Receiver& receiver_;
};

// The device memory that a pause of these tags takes away: handle by handle, as it can be given if it is exportable.
struct Leaving {
  int device;
  HandleKind kind;
};
std::vector<Leaving> find_leaving(Core& core, const TagRequest& tags);

// A pause with this move.
Report hand_over(Core& core, OperationRequest request, const Receiver& receiver);

}  // namespace ebbtide
