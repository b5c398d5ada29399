#include "bindings/frames.h"

#include <algorithm>
#include <utility>

#include "api/ebbtide_settings.h"

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

int generation = 0;
int open_captures = 0;

// Every thread's stack, for queries about other threads. Leaked on purpose.
std::vector<std::weak_ptr<FrameStack>>& all_stacks() {
  static auto* const stacks = new std::vector<std::weak_ptr<FrameStack>>;
  return *stacks;
}

void end_counted_capture() noexcept {
  --open_captures;
  without_gil([] { return ebbtide_end_capture(nullptr); });  // runs the frees that captures deferred
}

}  // namespace

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// --- Holding ---

int Holding::fork_generation() { return generation; }

int Holding::capture_count() { return open_captures; }

void Holding::forget_parent() {
  ++generation;
  open_captures = 0;
}

std::shared_ptr<HeldLease> Holding::open_lease(const std::string& tag, const std::string& holder) {
  if (tag.find('\0') != std::string::npos) throw py::value_error("a tag can't hold control characters");
  auto held = std::make_shared<HeldLease>();
  leases_.reserve(leases_.size() + 1);
  ebbtide_lease lease{};
  call([&](ebbtide_error* error) { return ebbtide_open_lease(tag.c_str(), holder.c_str(), &lease, error); });
  *held = {lease.id, lease.epoch, lease.is_away != 0, true};
  leases_.push_back(held);
  return held;
}

std::shared_ptr<HeldLease> Holding::withhold() {
  auto held = std::make_shared<HeldLease>();
  leases_.push_back(held);
  return held;
}

void Holding::begin_capture() {
  call([](ebbtide_error* error) { return ebbtide_begin_capture(error); });
  ++captures_;
  ++open_captures;
}

void Holding::end_all() noexcept {
  while (!leases_.empty()) {
    const std::shared_ptr<HeldLease> held = std::move(leases_.back());
    leases_.pop_back();
    held->is_open = false;
    if (is_ours() && held->id != 0) ebbtide_close_lease(held->id, nullptr);  // a look-up: not worth letting the GIL go
  }
  while (captures_ > 0) {
    --captures_;
    if (is_ours()) end_counted_capture();
  }
}

// --- Use ---

void Use::begin() {
  token_ = py::reinterpret_steal<py::object>(PyObject_CallObject(enter_.ptr(), arguments_.ptr()));
  if (!token_) throw py::error_already_set();
}

py::object Use::end(FirstError& error) {
  const py::tuple arguments = leaves_by_token_ ? py::make_tuple(token_) : arguments_;
  for (const py::handle verb : leave_) {
    const auto result = py::reinterpret_steal<py::object>(PyObject_CallObject(verb.ptr(), arguments.ptr()));
    if (result) continue;
    error.take_current();
    break;
  }
  return std::exchange(token_, py::object());
}

// --- Frame ---

std::string Frame::name() const {
  return policy.tag[0] != '\0' ? "region '" + std::string(policy.tag) + "'" : "disabled()";
}

void Frame::tag_thread(const std::string& tag, int32_t backup, bool retain) {
  ebbtide_thread_policy inside = EBBTIDE_THREAD_POLICY_INIT;
  call([&](ebbtide_error* error) { return ebbtide_check_tag(tag.data(), tag.size(), error); });
  inside.tagging = EBBTIDE_TAGGING_ON;
  inside.backup = backup;
  inside.retain = retain ? 1 : 0;
  inside.lease = newest_lease();
  tag.copy(inside.tag, sizeof inside.tag - 1);
  policy = inside;
}

Frame::~Frame() {
  if (!is_active_ || !is_ours() || is_finalizing()) return;
  FirstError error;
  deactivate(error);
  try {
    error.raise_if_any();
  } catch (py::error_already_set& failure) {
    failure.discard_as_unraisable("a frame that nobody closed");
  }
}

void Frame::activate() {
  size_t begun = 0;
  try {
    for (; begun < uses_.size(); ++begun) uses_[begun].begin();
  } catch (py::error_already_set&) {
    FirstError ignored;  // that of the beginning goes first
    while (begun-- > 0) uses_[begun].end(ignored);
    throw;
  }
  is_active_ = true;
}

void Frame::deactivate(FirstError& error, std::vector<py::object>* kept) {
  if (!std::exchange(is_active_, false) || !is_ours()) return;
  for (size_t index = uses_.size(); index-- > 0;) {
    py::object token = uses_[index].end(error);
    if (kept != nullptr) kept->push_back(std::move(token));
  }
}

void Frame::close(FirstError& error) {
  if (std::exchange(is_closed, true)) return;
  deactivate(error);
  end_all();
}

// --- FrameStack ---

FrameStack::FrameStack() : thread_(PyThread_get_thread_ident()), generation_(generation) {}

FrameStack& FrameStack::mine() {
  static constexpr const char* kName = "ebbtide.frames";
  PyObject* const state = PyThreadState_GetDict();  // borrowed; dies with the thread
  if (state == nullptr) throw std::bad_alloc();
  if (PyObject* const known = PyDict_GetItemString(state, kName)) {
    auto* const held = static_cast<std::shared_ptr<FrameStack>*>(PyCapsule_GetPointer(known, kName));
    if (held != nullptr && (*held)->generation_ == generation) return **held;
  }
  auto made = std::make_unique<std::shared_ptr<FrameStack>>(new FrameStack);
  FrameStack& stack = **made;
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(made.get(), kName, [](PyObject* dying) {
    auto* const held = static_cast<std::shared_ptr<FrameStack>*>(PyCapsule_GetPointer(dying, kName));
    // A parent's frames must not be touched, and at the interpreter's end nothing needs closing: leaked.
    if ((*held)->generation_ != generation || is_finalizing()) return;
    (*held)->end();
    delete held;
  }));
  if (!capsule) throw py::error_already_set();
  auto& stacks = all_stacks();
  std::erase_if(stacks, [](const std::weak_ptr<FrameStack>& other) { return other.expired(); });
  stacks.push_back(*made);
  [[maybe_unused]] const auto* const the_capsules = made.release();
  if (PyDict_SetItemString(state, kName, capsule.ptr()) != 0) throw py::error_already_set();
  return stack;
}

bool FrameStack::is_of_this_process() const { return generation_ == generation; }

bool FrameStack::is_mine() const { return thread_ == PyThread_get_thread_ident() && generation_ == generation; }

bool FrameStack::is_in_region() const {
  return std::any_of(frames_.begin(), frames_.end(), [](const FramePointer& frame) { return frame->holds_lease(); });
}

std::vector<unsigned long> FrameStack::others_in_regions() {
  std::vector<unsigned long> threads;
  for (const auto& entry : all_stacks()) {
    const auto stack = entry.lock();
    if (stack != nullptr && stack->generation_ == generation && !stack->is_mine() && stack->is_in_region())
      threads.push_back(stack->thread_);
  }
  return threads;
}

bool FrameStack::is_open_elsewhere(PyObject* owner) {
  return std::any_of(all_stacks().begin(), all_stacks().end(), [owner](const std::weak_ptr<FrameStack>& entry) {
    const auto stack = entry.lock();
    return stack != nullptr && stack->generation_ == generation && !stack->is_mine() && stack->find(owner) != nullptr;
  });
}

FramePointer FrameStack::find(PyObject* owner) const {
  const auto found = std::find_if(frames_.rbegin(), frames_.rend(),
                                  [owner](const FramePointer& frame) { return frame->owner.ptr() == owner; });
  return found == frames_.rend() ? nullptr : *found;
}

FramePointer FrameStack::inside(const FramePointer& frame) const {
  const auto end = std::find(frames_.rbegin(), frames_.rend(), frame);
  if (end == frames_.rend()) return nullptr;
  const auto found =
      std::find_if(frames_.rbegin(), end, [](const FramePointer& each) { return !each->owner.is_none(); });
  return found == end ? nullptr : *found;
}

// Which frames torch is to see, outermost first. Where the inner pool takes precedence, outer ones stay open below it:
// another thread may end the inner one, and cannot open an outer one for this thread.
std::vector<FramePointer> FrameStack::visible() const {
  std::vector<FramePointer> chosen;
  bool is_below_all = false;
  bool is_hidden = false;
  for (auto frame = frames_.rbegin(); frame != frames_.rend(); ++frame) {
    const bool takes_all = (*frame)->takes_all_threads;
    // A thread's own pool takes precedence over one that is open for all threads, whichever was opened first. What is
    // hidden from its own thread is hidden from the others.
    if (takes_all ? !is_hidden : !is_below_all) chosen.push_back(*frame);
    is_below_all = is_below_all || takes_all;
    is_hidden = is_hidden || (*frame)->hides_outer;
    // Without a use of its own it hides the outer frames only by their absence.
    if (!(*frame)->beats_all || ((*frame)->hides_outer && !(*frame)->has_uses())) break;
  }
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

void FrameStack::show(FirstError& error, bool must_succeed) {
  const std::vector<FramePointer> wanted = visible();
  size_t common = 0;
  while (common < std::min(wanted.size(), active_.size()) && wanted[common] == active_[common]) ++common;
  while (active_.size() > common) {
    const FramePointer frame = std::move(active_.back());
    active_.pop_back();
    frame->deactivate(error);
  }
  left_over_.clear();
  active_.reserve(wanted.size());
  for (size_t index = common; index < wanted.size(); ++index) {
    try {
      wanted[index]->activate();
    } catch (py::error_already_set& failure) {
      error.take(failure);
      if (must_succeed) return;
      continue;
    }
    active_.push_back(wanted[index]);
  }
}

// What a thread that is not the stack's own can do: it ends uses, and begins those that are open for all threads.
void FrameStack::show_from_elsewhere(FirstError& error) {
  const std::vector<FramePointer> wanted = visible();
  const auto is_in = [](const std::vector<FramePointer>& frames, const FramePointer& frame) {
    return std::find(frames.begin(), frames.end(), frame) != frames.end();
  };
  while (true) {
    const auto found = std::find_if(active_.rbegin(), active_.rend(),
                                    [&](const FramePointer& frame) { return !is_in(wanted, frame); });
    if (found == active_.rend()) break;
    const FramePointer frame = *found;
    std::erase(active_, frame);
    frame->deactivate(error, &left_over_);
  }
  std::vector<FramePointer> shown;
  for (const FramePointer& frame : wanted) {
    try {
      if (!is_in(active_, frame)) {
        if (!frame->takes_all_threads) continue;
        frame->activate();
      }
      shown.push_back(frame);
    } catch (py::error_already_set& failure) {
      error.take(failure);
    }
  }
  active_ = std::move(shown);
}

// Tasks take turns in one thread, and torch knows only threads.
FramePointer FrameStack::of_another_task(const Frame& frame) const {
  const auto found = std::find_if(frames_.rbegin(), frames_.rend(), [&](const FramePointer& open) {
    return open->task != 0 && open->task != frame.task;
  });
  return found == frames_.rend() ? nullptr : *found;
}

void FrameStack::push(const FramePointer& frame) {
  FirstError error;
  if (const FramePointer other = of_another_task(*frame)) {
    const std::string message = "another task of this thread is inside " + other->name() +
                                " and awaits there. Tasks share their thread, so " + frame->name() +
                                " would take over what that task allocates: don't await inside a region";
    frame->close(error);
    raise_state_error(message);
  }
  if (!frame->refusal_beside.empty() && !others_in_regions().empty()) {
    frame->close(error);
    raise_state_error(frame->refusal_beside);
  }
  frames_.push_back(frame);
  frame->stack = weak_from_this();
  show(error, true);
  if (!error.is_any()) return apply_policy(frame);
  std::erase(frames_, frame);
  show(error, false);
  frame->close(error);
  error.raise_if_any();
}

void FrameStack::close(const FramePointer& frame) {
  if (!is_of_this_process()) return;
  const FramePointer kept = frame;  // until all is done
  FirstError error;
  undo_policy(kept);
  if (std::erase(frames_, kept) > 0) {
    if (is_mine()) {
      show(error, false);
    } else {
      show_from_elsewhere(error);
    }
  }
  kept->close(error);
  error.raise_if_any();
}

void FrameStack::reenter() {
  FirstError error;
  while (!active_.empty()) {
    const FramePointer frame = std::move(active_.back());
    active_.pop_back();
    frame->deactivate(error);
  }
  show(error, false);
  error.raise_if_any();
}

// Another thread may get the same number, and torch would take its allocations for this one's.
void FrameStack::end() noexcept {
  while (!frames_.empty()) {
    try {
      close(frames_.back());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a thread that ended inside a region");
    }
  }
}

}  // namespace ebbtide::bindings
