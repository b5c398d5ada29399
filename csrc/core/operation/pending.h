#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "core/operation/operation.h"

namespace ebbtide {

// A background resume: its memory is mapped, its copies are queued on the device, and a thread sees it to its end.
// Until then it holds its tags, so that a pause waits for it, and frees are deferred. The thread owns it, too: it goes
// on when everybody else has let go of it, and the process does not end before it is over. Where a device can't be
// copied to in the background, the resume is over when start() returns.
class PendingResume {
 public:
  // Throws if mapping or queueing fails; nothing has moved then.
  static std::shared_ptr<PendingResume> start(std::unique_ptr<Operation> operation);
  PendingResume(const PendingResume&) = delete;
  PendingResume& operator=(const PendingResume&) = delete;

  // Makes a stream of this device wait for the bytes of these ranges (none: for everything). Ranges that are not being
  // resumed count as arrived. Where the device has no such waits, the calling thread waits. Throws StateError while the
  // stream captures.
  void stream_wait(int device, CUstream stream, const std::vector<AddressRange>& ranges);
  // Whether the bytes of the range are there. Also true after a failure: wait() tells of it.
  bool is_ready(const AddressRange& range) const;
  // Whether wait() would return at once.
  bool is_over() const;
  // Waits for the end. The report, or the error, each time.
  Report wait();

 private:
  explicit PendingResume(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}
  bool have_arrived(const std::vector<AddressRange>& ranges) const;
  void run() noexcept;
  std::shared_ptr<const Arrivals> arrivals() const;
  void wait_here(const std::vector<AddressRange>& ranges) const;

  std::unique_ptr<Operation> operation_;
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  bool is_over_ = false;
  std::shared_ptr<const Arrivals> arrivals_;  // null once it is over
  Report report_;
  std::exception_ptr error_;
};

}  // namespace ebbtide
