// Streams and events without a worker thread: asynchronous work runs in the thread that waits for it or polls it.
//
// - Every stream is a queue. An item is numbered in its stream, and a Point names "this stream up to this number".
// - An item names the points that it comes after. They were all submitted before it, so running a stream up to a point
//   always ends if the items that it waits for run first.
// - The legacy stream's items come after everything that blocking streams of its context hold, and theirs after its.
// - Items may release the lock while they work. A running stream is left alone until its item is done.
// - An item may wait for a number in memory. A thread that waits for such a stream polls, releases the lock meanwhile,
//   and runs the items of other streams, one of which may be about to write the number.
#pragma once

#include <cuda.h>

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

// Called with the lock held; may give it back while it works. An error becomes the context's sticky error.
using Work = std::function<CUresult(Lock&)>;

// Whether an item need not wait for a number any longer. Called with the lock held, which it keeps.
using Readiness = std::function<bool(Lock&)>;

struct Item {
  Work work;
  std::vector<Point> after;
  Readiness is_ready;  // null: at once
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

struct Event {
  uint64_t context;
  Point recorded;
  // Set while the last record went into a capture.
  CaptureRef capture;
  Progress progress;
};

enum class AsyncMode { kLate = 0, kEager = 1, kRandom = 2 };

class Streams {
 public:
  // Finds what a caller's handle names: the null handle and CU_STREAM_LEGACY are the current context's legacy stream.
  CUresult find(Lock& lock, CUstream handle, StreamRef& stream);
  Event* find_event(uint64_t id);
  uint64_t add_stream(Lock& lock, bool is_blocking);
  uint64_t add_event(Lock& lock);
  void remove_event(uint64_t id) { events_.erase(id); }

  // Queues work, or records it where the stream captures. May give the lock back.
  CUresult submit(Lock& lock, const StreamRef& stream, Work work, std::vector<Point> after = {},
                  Readiness is_ready = nullptr);
  // Runs everything up to the point. May give the lock back.
  void run_until(Lock& lock, const Point& point);
  // The same, but stops where an item waits for a number.
  void run_until_blocked(Lock& lock, const Point& point);
  // Runs one item on the way to the point, if another thread is not at it.
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
  // Whether the legacy stream may be used now; a blocking stream's capture forbids it and is broken by the try.
  CUresult use_legacy(uint64_t context);

  // Runs all work of the context (all contexts for 0) whatever captures go on.
  void drain(Lock& lock, uint64_t context);
  // Runs all work of all contexts that waits for no number.
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
  // Goes one step towards the point: runs an item, or waits for the thread that runs one. False: an item waits for a
  // number.
  bool advance(Lock& lock, const Point& point);
  // Runs the first item of any stream that may run. False: there is none.
  bool run_any(Lock& lock);
  CUresult sticky_error(uint64_t context) const;

  std::map<uint64_t, StreamRef> streams_;
  std::map<uint64_t, StreamRef> legacy_;
  std::map<std::pair<uint64_t, std::thread::id>, StreamRef> per_thread_;
  // Destroyed while an item waited for a number: they live until their work is done.
  std::vector<StreamRef> orphans_;
  std::map<uint64_t, Event> events_;
  std::set<uint64_t> graphs_;
  Captures captures_;
  AsyncMode mode_ = AsyncMode::kLate;
  std::mt19937_64 random_;
};

}  // namespace ebbtide::sim
