#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/call.h"

// The leases that a thread has open, and the pools that torch uses for it. All of it is used with the GIL held. No
// function here runs bytecode when its callees are built in, so nothing can interrupt it midway (scopes.cpp has the
// protocol).
namespace ebbtide::bindings {

// Keeps the first of several errors.
class FirstError {
 public:
  // Whether body() ran without one.
  template <typename Body>
  bool attempt(Body body) {
    try {
      body();
      return true;
    } catch (pybind11::error_already_set& error) {
      if (!error_) error_.emplace(error);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      const pybind11::error_already_set raised;
      if (!error_) error_.emplace(raised);
    }
    return false;
  }
  bool is_any() const { return error_.has_value(); }
  void raise_if_any() const {
    if (error_) throw pybind11::error_already_set(*error_);
  }
  // For a destructor, which can't raise it.
  void report(const char* where) {
    if (error_) error_->discard_as_unraisable(where);
  }

 private:
  std::optional<pybind11::error_already_set> error_;
};

// A lease while its frame holds it. Without a number it stands for memory that is kept from others and that the core
// need not know of.
struct HeldLease {
  uint64_t id = 0;
  uint64_t epoch = 0;
  bool is_away = false;
  bool is_open = true;
};

// One use of a torch pool or of a suspension: the calls that begin and end it, and the result of the first one.
struct Use {
  pybind11::object enter;
  pybind11::tuple arguments, leave;
  bool leaves_by_token;
  pybind11::object token;
};

class FrameStack;

// One open `with`, or something that is open like one: leases, counted captures and uses of torch's pools. Each lease
// and capture is opened and recorded in one step; close() or destruction ends them all.
class Frame {
 public:
  Frame() = default;
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;
  ~Frame();

  std::shared_ptr<HeldLease> open_lease(const std::string& tag, const std::string& holder);
  std::shared_ptr<HeldLease> withhold();
  void begin_capture();
  void add_use(pybind11::object enter, pybind11::tuple arguments, pybind11::tuple leave, bool leaves_by_token);
  // The thread's own allocations in a preloaded program have the tag, as long as the newest lease of this frame is
  // open. Throws for a malformed tag.
  void tag_thread(const std::string& tag, int32_t backup, bool retain);
  // Begins all uses, or none.
  void activate();
  // kept: gets the results of the calls that began the uses.
  void deactivate(FirstError& error, std::vector<pybind11::object>* kept = nullptr);
  // Of a frame that is on no thread's stack.
  void close(FirstError& error);
  std::string name() const;  // for messages
  bool is_active() const { return is_active_; }
  bool is_closed() const { return is_closed_; }
  bool has_uses() const { return !uses_.empty(); }
  bool holds_lease() const { return !leases_.empty(); }

  // The number of captures that all frames count.
  static int capture_count();
  // In a forked child, which must not close frames that its parent opened.
  static void forget_parent();

  pybind11::object owner = pybind11::none();
  pybind11::object after = pybind11::none();  // called, if it is callable, once the frame is closed
  // The asyncio task that entered it, of those that share the thread: its id(), since a reference would keep a task
  // that is never awaited inside for ever. 0: none.
  uint64_t task = 0;
  bool takes_all_threads = false;
  bool hides_outer = false;
  bool beats_all = false;      // in torch it takes precedence over a pool that is open for all threads
  std::string refusal_beside;  // not empty: the error if another thread is in a region
  // The policy of the thread's own allocations in a preloaded program, besides the pools: UNSET is as outside. OFF
  // keeps the tag and backup from outside.
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  std::weak_ptr<FrameStack> stack;

 private:
  bool is_of_this_process() const;
  void end_leases_and_captures() noexcept;

  std::vector<std::shared_ptr<HeldLease>> leases_;
  int captures_ = 0;
  std::vector<Use> uses_;
  bool is_active_ = false;
  bool is_closed_ = false;
  const int generation_ = fork_generation();
  static int fork_generation();
};

using FramePointer = std::shared_ptr<Frame>;

// Ends all that the frame holds, whichever stack it is on. A second call does nothing.
void close_frame(const FramePointer& frame);

// The open frames of one thread. The innermost one decides where the thread's allocations go. The pools of the others
// stay open below it where an inner pool takes precedence in this torch. Elsewhere only the innermost one is open.
class FrameStack : public std::enable_shared_from_this<FrameStack> {
 public:
  // The calling thread's.
  static FrameStack& mine();
  // The number of other threads that are in a region.
  static std::vector<unsigned long> others_in_regions();
  static bool is_open_elsewhere(const pybind11::object& owner);

  // Makes frame the innermost one. On failure the frame is closed, and everything else is as before.
  void push(const FramePointer& frame);
  // Closes frame, which need not be the innermost one, since generators end at any time. Another thread (a finalizer)
  // may call it too. It can't open a pool for this thread alone: an outer frame that is not open by then stays so until
  // this thread enters or leaves a region.
  void close(const FramePointer& frame);
  // Closes and reopens this thread's frames in torch, so that they precede a pool that was opened since.
  void reenter();
  FramePointer find(const pybind11::object& owner) const;
  // The innermost `with` that was entered inside it; null if there is none, or this stack does not have it.
  FramePointer inside(const FramePointer& frame) const;
  bool is_mine() const;
  bool is_of_this_process() const;  // false for a stack copied from the parent by fork

 private:
  FrameStack();
  static void end(PyObject* capsule);
  void refuse(const Frame& frame) const;
  std::vector<FramePointer> visible() const;
  void show(FirstError& error);
  void set_policy(const Frame& changed);

  const unsigned long thread_;
  const int generation_;
  std::vector<FramePointer> frames_, active_;
  std::vector<pybind11::object> left_over_;              // released by its own thread
  std::optional<ebbtide_thread_policy> outside_policy_;  // the thread's before its frames set one
};

void register_frames(pybind11::module_& module);

}  // namespace ebbtide::bindings
