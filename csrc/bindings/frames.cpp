#include "bindings/frames.h"

#include <algorithm>
#include <utility>

#include "api/ebbtide_settings.h"
#include "bindings/segments.h"

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

int generation = 0;  // the number of forks in this process's ancestry
int open_captures = 0;

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Every thread's stack, for queries about other threads. Leaked on purpose.
std::vector<std::weak_ptr<FrameStack>>& all_stacks() {
  static auto* const stacks = new std::vector<std::weak_ptr<FrameStack>>;
  return *stacks;
}

std::vector<std::shared_ptr<FrameStack>> other_stacks() {
  std::vector<std::shared_ptr<FrameStack>> others;
  for (const auto& entry : all_stacks()) {
    const auto stack = entry.lock();
    if (stack != nullptr && stack->is_of_this_process() && !stack->is_mine()) others.push_back(stack);
  }
  return others;
}

bool has(const std::vector<FramePointer>& frames, const FramePointer& frame) {
  return std::find(frames.begin(), frames.end(), frame) != frames.end();
}

void end_use(Use& use) {
  const py::tuple arguments = use.leaves_by_token ? py::make_tuple(use.token) : use.arguments;
  for (const py::handle verb : use.leave) verb(*arguments);
}

}  // namespace

// --- Frame ---

int Frame::fork_generation() { return generation; }

int Frame::capture_count() { return open_captures; }

void Frame::forget_parent() {
  ++generation;
  open_captures = 0;
  forget_segment_holds();
}

bool Frame::is_of_this_process() const { return generation_ == generation; }

std::shared_ptr<HeldLease> Frame::open_lease(const std::string& tag, const std::string& holder) {
  auto held = std::make_shared<HeldLease>();
  leases_.reserve(leases_.size() + 1);
  ebbtide_lease lease{};
  call(ebbtide_open_lease, check_text(tag), holder.c_str(), &lease);
  *held = {lease.id, lease.epoch, lease.is_away, true};
  leases_.push_back(held);
  return held;
}

std::shared_ptr<HeldLease> Frame::withhold() { return leases_.emplace_back(std::make_shared<HeldLease>()); }

void Frame::begin_capture() {
  hold_segments();
  try {
    call(ebbtide_begin_capture);
  } catch (...) {
    release_segments();
    throw;
  }
  ++captures_;
  ++open_captures;
}

void Frame::add_use(py::object enter, py::tuple arguments, py::tuple leave, bool leaves_by_token) {
  uses_.push_back({std::move(enter), std::move(arguments), std::move(leave), leaves_by_token, {}});
}

void Frame::tag_thread(const std::string& tag, int32_t backup, bool retain) {
  ebbtide_thread_policy inside = EBBTIDE_THREAD_POLICY_INIT;
  call(ebbtide_check_tag, tag.data(), tag.size());
  inside.tagging = EBBTIDE_TAGGING_ON;
  inside.backup = backup;
  inside.retain = retain ? 1 : 0;
  inside.lease = leases_.empty() ? 0 : leases_.back()->id;
  tag.copy(inside.tag, sizeof inside.tag - 1);
  policy = inside;
}

std::string Frame::name() const {
  return policy.tag[0] != '\0' ? "region '" + std::string(policy.tag) + "'" : "disabled()";
}

void Frame::activate() {
  if (has_uses()) hold_segments();
  size_t begun = 0;
  try {
    for (; begun < uses_.size(); ++begun) uses_[begun].token = uses_[begun].enter(*uses_[begun].arguments);
  } catch (...) {
    FirstError ignored;  // that of the beginning goes first
    while (begun-- > 0) ignored.attempt([&] { end_use(uses_[begun]); });
    release_segments();
    throw;
  }
  is_active_ = true;
}

void Frame::deactivate(FirstError& error, std::vector<py::object>* kept) {
  if (!std::exchange(is_active_, false) || !is_of_this_process()) return;
  for (auto use = uses_.rbegin(); use != uses_.rend(); ++use) {
    error.attempt([&] { end_use(*use); });
    py::object token = std::exchange(use->token, {});
    if (kept != nullptr) kept->push_back(std::move(token));
  }
  if (has_uses()) release_segments();
}

void Frame::end_leases_and_captures() noexcept {
  while (!leases_.empty()) {
    const std::shared_ptr<HeldLease> held = std::move(leases_.back());
    leases_.pop_back();
    held->is_open = false;
    // a look-up: not worth letting the GIL go
    if (is_of_this_process() && held->id != 0) ebbtide_close_lease(held->id, nullptr);
  }
  for (; captures_ > 0; --captures_) {
    if (!is_of_this_process()) continue;
    --open_captures;
    without_gil([] { return ebbtide_end_capture(nullptr); });  // runs the frees that captures deferred
    release_segments();
  }
}

void Frame::close(FirstError& error) {
  if (std::exchange(is_closed_, true)) return;
  deactivate(error);
  end_leases_and_captures();
}

Frame::~Frame() {
  FirstError error;
  if (is_finalizing()) is_active_ = false;
  close(error);
  error.report("a frame that was never closed");
}

void close_frame(const FramePointer& frame) {
  if (const auto stack = frame->stack.lock()) return stack->close(frame);
  FirstError error;
  frame->close(error);
  error.raise_if_any();
}

// --- FrameStack ---

FrameStack::FrameStack() : thread_(PyThread_get_thread_ident()), generation_(generation) {}

FrameStack& FrameStack::mine() {
  static constexpr const char* kName = "ebbtide.frames";
  PyObject* const state = PyThreadState_GetDict();  // borrowed; dies with the thread
  if (state == nullptr) throw std::bad_alloc();
  if (PyObject* const known = PyDict_GetItemString(state, kName)) {
    auto* const held = static_cast<std::shared_ptr<FrameStack>*>(PyCapsule_GetPointer(known, kName));
    if (held != nullptr && (*held)->is_of_this_process()) return **held;
  }
  auto made = std::make_unique<std::shared_ptr<FrameStack>>(new FrameStack);
  const std::shared_ptr<FrameStack> stack = *made;
  const py::capsule capsule(made.get(), kName, &FrameStack::end);
  [[maybe_unused]] const auto* const the_capsules = made.release();
  std::erase_if(all_stacks(), [](const std::weak_ptr<FrameStack>& other) { return other.expired(); });
  all_stacks().push_back(stack);
  if (PyDict_SetItemString(state, kName, capsule.ptr()) != 0) throw py::error_already_set();
  return *stack;
}

// Its thread ends. Another thread may get the same number, and torch would take its allocations for this one's.
void FrameStack::end(PyObject* capsule) {
  auto* const held =
      static_cast<std::shared_ptr<FrameStack>*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  // A parent's frames must not be touched, and at the interpreter's end nothing needs closing: leaked.
  if (!(*held)->is_of_this_process() || is_finalizing()) return;
  FirstError error;
  while (!(*held)->frames_.empty()) error.attempt([&] { (*held)->close((*held)->frames_.back()); });
  error.report("a thread that ended inside a region");
  delete held;
}

bool FrameStack::is_of_this_process() const { return generation_ == generation; }

bool FrameStack::is_mine() const { return thread_ == PyThread_get_thread_ident() && is_of_this_process(); }

std::vector<unsigned long> FrameStack::others_in_regions() {
  std::vector<unsigned long> threads;
  for (const auto& stack : other_stacks()) {
    if (std::any_of(stack->frames_.begin(), stack->frames_.end(),
                    [](const auto& frame) { return frame->holds_lease(); }))
      threads.push_back(stack->thread_);
  }
  return threads;
}

bool FrameStack::is_open_elsewhere(const py::object& owner) {
  const auto others = other_stacks();
  return std::any_of(others.begin(), others.end(), [&](const auto& stack) { return stack->find(owner) != nullptr; });
}

FramePointer FrameStack::find(const py::object& owner) const {
  const auto found =
      std::find_if(frames_.rbegin(), frames_.rend(), [&](const FramePointer& frame) { return frame->owner.is(owner); });
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
    // A thread's own pool takes precedence over one that is open for all threads, whichever was opened first. A pool
    // that is hidden from its own thread is hidden from the others.
    if (takes_all ? !is_hidden : !is_below_all) chosen.push_back(*frame);
    is_below_all = is_below_all || takes_all;
    is_hidden = is_hidden || (*frame)->hides_outer;
    // Without a use of its own it hides the outer frames only by their absence.
    if (!(*frame)->beats_all || ((*frame)->hides_outer && !(*frame)->has_uses())) break;
  }
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

// Uses of one thread nest, so the uses above a change end and begin again. Another thread can only end uses, and
// begin those that are open for all threads.
void FrameStack::show(FirstError& error) {
  const std::vector<FramePointer> wanted = visible();
  const bool is_own = is_mine();
  size_t common = 0;
  while (common < std::min(wanted.size(), active_.size()) && wanted[common] == active_[common]) ++common;
  std::vector<FramePointer> staying(active_.begin(), active_.begin() + static_cast<std::ptrdiff_t>(common));
  if (!is_own) {
    staying = active_;
    std::erase_if(staying, [&](const FramePointer& frame) { return !has(wanted, frame); });
  }
  const std::vector<FramePointer> before = std::exchange(active_, staying);
  for (auto frame = before.rbegin(); frame != before.rend(); ++frame)
    if (!has(staying, *frame)) (*frame)->deactivate(error, is_own ? nullptr : &left_over_);
  if (is_own) left_over_.clear();
  std::vector<FramePointer> shown;
  for (const FramePointer& frame : wanted) {
    const bool is_open = has(staying, frame);
    if (!is_open && !is_own && !frame->takes_all_threads) continue;
    if (is_open || error.attempt([&] { frame->activate(); })) shown.push_back(frame);
  }
  active_ = std::move(shown);
}

// Tasks take turns in one thread, and torch knows only threads.
void FrameStack::refuse(const Frame& frame) const {
  const auto other = std::find_if(frames_.rbegin(), frames_.rend(), [&](const FramePointer& open) {
    return open->task != 0 && open->task != frame.task;
  });
  if (other != frames_.rend())
    raise_state_error("another task of this thread is inside " + (*other)->name() +
                      " and awaits there. Tasks share their thread, so " + frame.name() +
                      " would take over that task's allocations: don't await inside a region");
  if (!frame.refusal_beside.empty() && !others_in_regions().empty()) raise_state_error(frame.refusal_beside);
}

void FrameStack::push(const FramePointer& frame) {
  FirstError error;
  if (error.attempt([&] { refuse(*frame); })) {
    frames_.push_back(frame);
    frame->stack = weak_from_this();
    show(error);
    if (!error.is_any()) return set_policy(*frame);
    std::erase(frames_, frame);
    show(error);
  }
  frame->close(error);
  error.raise_if_any();
}

void FrameStack::close(const FramePointer& frame) {
  if (!is_of_this_process()) return;
  const FramePointer kept = frame;  // until all is done
  FirstError error;
  if (std::erase(frames_, kept) > 0) {
    show(error);
    set_policy(*kept);
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
  show(error);
  error.raise_if_any();
}

// In a preloaded program: the thread's own allocations get the policy of its innermost frame that has one. Another
// thread cannot set this one's: a region's ends with its lease, and that of `disabled()` when this thread next leaves
// or enters one.
void FrameStack::set_policy(const Frame& changed) {
  if (changed.policy.tagging == EBBTIDE_TAGGING_UNSET || !is_mine()) return;
  if (!outside_policy_) {
    outside_policy_.emplace(ebbtide_thread_policy EBBTIDE_THREAD_POLICY_INIT);
    ebbtide_get_thread_policy(&*outside_policy_, nullptr);
  }
  ebbtide_thread_policy policy = *outside_policy_;
  bool is_any = false;
  for (const FramePointer& frame : frames_) {
    is_any = is_any || frame->policy.tagging != EBBTIDE_TAGGING_UNSET;
    if (frame->policy.tagging == EBBTIDE_TAGGING_ON) policy = frame->policy;
    if (frame->policy.tagging != EBBTIDE_TAGGING_OFF) continue;
    policy.tagging = EBBTIDE_TAGGING_OFF;
    policy.lease = 0;
  }
  ebbtide_set_thread_policy(&policy, nullptr);
  if (!is_any) outside_policy_.reset();
}

}  // namespace ebbtide::bindings
