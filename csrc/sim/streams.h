// Streams and events without a worker thread: asynchronous work runs in the thread that waits for it or polls it.
//
// - Every stream is a queue. Items are numbered within their stream, and a Point means "this stream up to this number".
// - An item lists the points that it must follow. Their items were all submitted before it, so running a stream up to a
//   point always ends if the items that it waits for run first.
// - The legacy stream's items follow everything that blocking streams of its context hold, and the reverse.
// - Items may release the lock while they work. Other threads leave a running stream alone until its item is done.
// - An item may wait for a number in memory. A thread that waits for such a stream polls, releases the lock meanwhile,
//   and runs the items of other streams, one of which may be about to write the number.
#pragma once

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "sim/capture.h"
#include "sim/lock.h"

namespace ebbtide::sim {

struct Stream;
using StreamRef = std::shared_ptr<Stream>;

struct Point {
  StreamRef stream;
  uint64_t sequence = 0;
  bool is_reached() const;
};

// Called with the lock held; may release it while it works. An error becomes the context's sticky error.
using Work = std::function<CUresult(Lock&)>;

// Whether an item no longer has to wait for a number. Called with the lock held, and does not release it.
using Readiness = std::function<bool(Lock&)>;

struct Item {
  Work work;
  std::vector<Point> after;
  Readiness is_ready;  // null: the item is always ready
};

struct Stream {
  uint64_t id = 0;
  uint64_t context = 0;
  bool is_legacy = false;
  bool is_blocking = false;
  std::deque<Item> queue;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  bool is_running = false;
  CaptureRef capture;
};

inline bool Point::is_reached() const { return stream == nullptr || stream->completed >= sequence; }

// When an event's last record ran; empty until then.
using RecordTime = std::optional<std::chrono::steady_clock::time_point>;

struct Event {
  uint64_t context;
  bool has_timing;
  Point recorded;
  std::shared_ptr<RecordTime> time;  // null if it was never recorded
  // Set if the last record was captured.
  CaptureRef capture;
  Progress progress;
};

enum class AsyncMode { kLate = 0, kEager = 1, kRandom = 2 };

class Streams {
 public:
  // Finds the stream of a caller's handle: the null handle and CU_STREAM_LEGACY are the current context's legacy
  // stream.
  CUresult find(Lock& lock, CUstream handle, StreamRef& stream);
  Event* find_event(uint64_t id);
  uint64_t add_stream(Lock& lock, bool is_blocking);
  uint64_t add_event(Lock& lock, bool has_timing);
  void remove_event(uint64_t id) { events_.erase(id); }

  // Queues work, or records it if the stream captures. May release the lock.
  CUresult submit(Lock& lock, const StreamRef& stream, Work work, std::vector<Point> after = {},
                  Readiness is_ready = nullptr);
  // Runs everything up to the point. May release the lock.
  void run_until(Lock& lock, const Point& point);
  // The same, but stops at an item that waits for a number.
  void run_until_blocked(Lock& lock, const Point& point);
  // Runs one item on the way to the point, unless another thread is running one.
  void run_one(Lock& lock, const Point& point);

  CUresult synchronize(Lock& lock, const StreamRef& stream);
  CUresult synchronize_context(Lock& lock, uint64_t context);
  CUresult query(Lock& lock, const StreamRef& stream);
  CUresult destroy(Lock& lock, const StreamRef& stream);
  CUresult record(Lock& lock, uint64_t event, const StreamRef& stream);
  CUresult wait(Lock& lock, const StreamRef& stream, uint64_t event);

  CUresult begin_capture(Lock& lock, const StreamRef& stream, CUstreamCaptureMode mode);
  CUresult end_capture(Lock& lock, const StreamRef& stream, uint64_t& graph);
  CUresult capture_status(const StreamRef& stream, CUstreamCaptureStatus& status);
  bool remove_graph(uint64_t graph) { return graphs_.erase(graph) == 1; }
  Captures& captures() { return captures_; }
  // Whether the legacy stream may be used now. A capture on a blocking stream forbids it, and the attempt breaks the
  // capture.
  CUresult use_legacy(uint64_t context);

  // Runs all work of the context (of all contexts for 0), whatever captures are in progress.
  void drain(Lock& lock, uint64_t context);
  // Runs all work of all contexts that does not wait for a number.
  void run_available(Lock& lock);
  void drop_context(Lock& lock, uint64_t context);
  void set_mode(AsyncMode mode, uint64_t seed);
  uint64_t stream_count() const { return streams_.size(); }
  uint64_t event_count() const { return events_.size(); }
  uint64_t queued_items() const;
  void reset();

 private:
  void drop_capture(const CaptureRef& capture);
  StreamRef legacy_stream(uint64_t context);
  StreamRef thread_stream(uint64_t context);
  std::vector<StreamRef> all_of(uint64_t context) const;
  std::vector<Point> implicit_dependencies(const StreamRef& stream);
  bool is_blocking_capture_active(uint64_t context) const;
  void run_front(Lock& lock, const StreamRef& stream);
  bool is_front_ready(Lock& lock, const Stream& stream) const;
  // Takes one step towards the point: runs an item, or waits for the thread that runs one. False if an item waits for a
  // number.
  bool advance(Lock& lock, const Point& point);
  // Runs the first item of any stream that is ready. False if there is none.
  bool run_any(Lock& lock);
  CUresult sticky_error(uint64_t context) const;

  std::map<uint64_t, StreamRef> streams_;
  std::map<uint64_t, StreamRef> legacy_;
  std::map<std::pair<uint64_t, std::thread::id>, StreamRef> per_thread_;
  // Streams that were destroyed while an item waited for a number. They live until their work is done.
  std::vector<StreamRef> orphans_;
  std::map<uint64_t, Event> events_;
  std::set<uint64_t> graphs_;
  Captures captures_;
  AsyncMode mode_ = AsyncMode::kLate;
  std::mt19937_64 random_;
};

}  // namespace ebbtide::sim
