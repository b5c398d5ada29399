#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/arrivals.h"
#include "core/operation.h"

namespace ebbtide {

// A resume whose memory is mapped and whose bytes are still on their way, moved by a thread of its own. The tags are held until it ends, so that a pause that comes meanwhile waits for it.
class PendingResume {
 public:
  // Maps everything in the calling thread. Throws what the mapping throws; nothing has moved then.
  static std::shared_ptr<PendingResume> start(std::unique_ptr<Operation> operation);
  PendingResume(const PendingResume&) = delete;
  PendingResume& operator=(const PendingResume&) = delete;
  // Waits for the end.
  ~PendingResume();

  // Lets a stream of this device wait for the bytes of these ranges (none: for everything). What is not on its way is there already. The calling thread waits, unless waits_on_device.
  // Throws StateError while the stream captures.
  void stream_wait(int device, CUstream stream, const std::vector<AddressRange>& ranges);
  // Whether the stream itself waits, where the driver has such waits. Off: as long as bytes are sent by driver calls, any call that waits for the device inside the driver (loading a kernel at
  // its first launch, cudaFree) then waits for ever.
  static inline std::atomic<bool> waits_on_device{false};
  // Whether the bytes of the range are there. Also true after a failure: wait() tells of it.
  bool is_ready(const AddressRange& range) const;
  // Whether wait() would return at once.
  bool is_over() const;
  // Waits for the end. The report, or the error, each time.
  Report wait();

 private:
  explicit PendingResume(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}
  void run() noexcept;
  void wait_here(const std::vector<AddressRange>& ranges) const;

  std::unique_ptr<Operation> operation_;
  std::unique_ptr<Arrivals> arrivals_;
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  bool is_over_ = false;
  Report report_;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace ebbtide
