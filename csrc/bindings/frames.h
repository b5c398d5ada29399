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
  void take(pybind11::error_already_set& error) {
    if (!error_) error_.emplace(error);
  }
  void take_current() {
    pybind11::error_already_set error;
    take(error);
  }
  bool is_any() const { return error_.has_value(); }
  // during: an error that is already known, which becomes this one's context, or None.
  void raise_if_any(const pybind11::object& during = pybind11::none()) {
    if (!error_) return;
    if (!during.is_none()) PyException_SetContext(error_->value().ptr(), Py_NewRef(during.ptr()));
    throw pybind11::error_already_set(*error_);
  }

 private:
  std::optional<pybind11::error_already_set> error_;
};

// A lease while its Holding holds it. Without a number it stands for memory that is kept from others and that the core
// need not know of.
struct HeldLease {
  uint64_t id = 0;
  uint64_t epoch = 0;
  bool is_away = false;
  bool is_open = true;
};

// Owns leases and counted captures. Each is opened and recorded in one step; close() or destruction ends it.
class Holding {
 public:
  Holding() = default;
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;
  virtual ~Holding() { end_all(); }
  // The number of forks in this process's ancestry: a child must not close what its parent opened.
  static int fork_generation();

  std::shared_ptr<HeldLease> open_lease(const std::string& tag, const std::string& holder);
  std::shared_ptr<HeldLease> withhold();
  void begin_capture();
  void end_all() noexcept;
  bool holds_lease() const { return !leases_.empty(); }
  // The number of captures that all Holdings count.
  static int capture_count();
  // In a forked child.
  static void forget_parent();

 protected:
  bool is_ours() const { return generation_ == fork_generation(); }
  uint64_t newest_lease() const { return leases_.empty() ? 0 : leases_.back()->id; }

 private:
  std::vector<std::shared_ptr<HeldLease>> leases_;
  int captures_ = 0;
  const int generation_ = fork_generation();
};

// One use of a torch pool or of a suspension, with the calls that begin and end it.
class Use {
 public:
  Use(pybind11::object enter, pybind11::tuple arguments, pybind11::tuple leave, bool leaves_by_token)
      : enter_(std::move(enter)),
        arguments_(std::move(arguments)),
        leave_(std::move(leave)),
        leaves_by_token_(leaves_by_token) {}
  void begin();
  // Runs the calls that end it, up to the first failure. Returns the result of begin(), which its thread may have to
  // release.
  pybind11::object end(FirstError& error);

 private:
  pybind11::object enter_;
  pybind11::tuple arguments_, leave_;
  bool leaves_by_token_;
  pybind11::object token_;
};

class FrameStack;

bool is_finalizing();

// One open `with`, or something that is open like one.
class Frame : public Holding {
 public:
  ~Frame() override;
  pybind11::object owner = pybind11::none();
  pybind11::object after = pybind11::none();  // called, if it is callable, once the frame is closed
  // The asyncio task that entered it, of those that share the thread: its id(), since a reference would keep a task
  // that nobody runs any more inside for ever. 0: none.
  uint64_t task = 0;
  bool takes_all_threads = false;
  bool hides_outer = false;
  bool beats_all = false;  // in torch it takes precedence over a pool that is open for all threads
  // What the thread's own allocations get in a preloaded program, besides the pools: UNSET is as outside. OFF keeps the
  // tag and backup from outside.
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  ebbtide_thread_policy replaced_policy = EBBTIDE_THREAD_POLICY_INIT;
  // As long as the newest lease of this frame is open. Throws for a malformed tag.
  void tag_thread(const std::string& tag, int32_t backup, bool retain);
  std::string name() const;    // for messages
  std::string refusal_beside;  // not empty: the error if another thread is in a region

  void add_use(pybind11::object enter, pybind11::tuple arguments, pybind11::tuple leave, bool leaves_by_token) {
    uses_.emplace_back(std::move(enter), std::move(arguments), std::move(leave), leaves_by_token);
  }
  // Begins all uses, or none.
  void activate();
  void deactivate(FirstError& error, std::vector<pybind11::object>* kept = nullptr);
  // Closes a frame that is on no thread's stack.
  void close(FirstError& error);
  bool is_active() const { return is_active_; }
  bool has_uses() const { return !uses_.empty(); }
  bool is_closed = false;
  std::weak_ptr<FrameStack> stack;

 private:
  std::vector<Use> uses_;
  bool is_active_ = false;
};

using FramePointer = std::shared_ptr<Frame>;

// The open frames of one thread. The innermost one decides where the thread's allocations go. The pools of the others
// stay open below it where an inner pool takes precedence in this torch. Elsewhere only the innermost one is open.
class FrameStack : public std::enable_shared_from_this<FrameStack> {
 public:
  // The calling thread's.
  static FrameStack& mine();
  // The number of other threads that are in a region.
  static std::vector<unsigned long> others_in_regions();
  static bool is_open_elsewhere(PyObject* owner);

  // Makes frame the innermost one. On failure the frame is closed, and everything else is as before.
  void push(const FramePointer& frame);
  // Closes frame, which need not be the innermost one, since generators end at any time. Another thread (a finalizer)
  // may call it too. It can't open a pool for this thread alone: an outer frame that is not open by then stays so until
  // this thread enters or leaves a region.
  void close(const FramePointer& frame);
  // Closes and reopens this thread's frames in torch, so that they precede a pool that was opened since.
  void reenter();
  FramePointer find(PyObject* owner) const;
  // The innermost `with` that was entered inside it; null if there is none, or this stack does not have it.
  FramePointer inside(const FramePointer& frame) const;
  bool is_mine() const;
  bool is_of_this_process() const;  // false for a stack copied from the parent by fork
  // The thread ends.
  void end() noexcept;

  PyObject* awaiting_exit = nullptr;  // borrowed: the newest exit that this thread looked up and that has no frame yet

 private:
  FrameStack();
  bool is_in_region() const;
  FramePointer of_another_task(const Frame& frame) const;
  std::vector<FramePointer> visible() const;
  void show(FirstError& error, bool must_succeed);
  void show_from_elsewhere(FirstError& error);
  FramePointer next_with_policy(const FramePointer& frame) const;
  void put_below(const FramePointer& inner, const ebbtide_thread_policy& policy);
  void apply_policy(const FramePointer& frame);
  void undo_policy(const FramePointer& frame);

  const unsigned long thread_;
  const int generation_;
  std::vector<FramePointer> frames_, active_;
  std::vector<pybind11::object> left_over_;  // released by its own thread
};

void register_frames(pybind11::module_& module);
void register_scopes(pybind11::module_& module);

}  // namespace ebbtide::bindings
