#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/operation/swapped_memory.h"
#include "core/resume/resume.h"
#include "share/outgoing.h"

namespace ebbtide {

// Device memory of another process that pauses, for a resume of this one: both together hold at most the larger side
// and a margin. One thread resumes, another is told what the other process does.
class Reception {
 public:
  static constexpr const char* kName = "reception";

  // leaving: what the other process will give, if it is exportable and wanted, or release. must_clear: what it gives
  // shows none of its bytes. So it is, too, unless this process's rules say otherwise.
  Reception(Core& core, const std::vector<Leaving>& leaving, bool must_clear);
  bool clears() const { return clears_; }

  // The resuming thread. Creates what the other process can't give, and a margin. The result is the handles that the
  // other process shall give. Throws OutOfMemory.
  std::vector<HandleKind> open(int device, std::vector<HandleKind> returning);
  SwappedMemory::Handle take(int device, const HandleKind& kind);
  // Gives back what was not taken.
  void close() noexcept;

  // The thread that hears of the other process. One that comes before open() or after close() is dropped.
  void receive(int device, uint64_t size_bytes, Descriptor file);
  void note_released(int device, uint64_t size_bytes);
  void end() noexcept;  // no more will come

 private:
  struct OnDevice {
    OnDevice(int device, uint64_t leaving_bytes, uint64_t limit_bytes) : memory(device, leaving_bytes, limit_bytes) {}
    SwappedMemory memory;
    DeviceCharge charge;  // for what will come
  };
  std::shared_ptr<OnDevice> find(int device, uint64_t size_bytes, DeviceCharge& charge);

  Core& core_;
  const bool clears_;
  std::map<int, std::map<HandleKind, size_t>> leaving_;  // by device
  std::mutex mutex_;                                     // of the two below
  std::map<int, std::shared_ptr<OnDevice>> devices_;
  bool has_ended_ = false;
};

// A resume with memory of another process.
class Incoming final : public Resume {
 public:
  using Visit = std::function<bool(int device, uint64_t size_bytes)>;  // false: it goes no further

  // want is called for each handle that the resume wants, then once with -1: from then on the other process may give.
  Incoming(Core& core, const OperationRequest& request, Reception& reception, Visit want)
      : Resume(core, request, request.tags), reception_(reception), want_(std::move(want)) {}
  void prepare(const Allocations& allocations) override;
  void settle() noexcept override;

 protected:
  bool takes_over_memory() const override { return true; }
  bool hides_old_bytes() const override { return reception_.clears(); }
  std::optional<TakenMemory> take_memory(int device, const HandleKind& kind) override;

 private:
  void want(int device, uint64_t size_bytes);

  Reception& reception_;
  const Visit want_;
};

Report resume_from(Core& core, OperationRequest request, Reception& reception, Incoming::Visit want);

}  // namespace ebbtide
