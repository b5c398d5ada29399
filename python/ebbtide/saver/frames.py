"""Each thread's stack of open regions, and which of their pools torch sees.

The innermost frame decides where a thread's allocations go. torch keeps no such stack that all its versions agree on,
so only what is needed is open in
torch at any time: the innermost frame, and below it the nearest one that takes every thread's allocations, where
torch lets an inner pool win over it.
"""

import contextlib
import logging
import os
import sys
import threading
from typing import Any, NamedTuple

from ebbtide import _core, driver_choice
from ebbtide.errors import Error, StateError
from ebbtide.saver import dead, pools, spilled
from ebbtide.saver.leases import LentPool, PoolKey, holder_name, restore_trimmed, shelf
from ebbtide.saver.names import NO_OVERFLOW_CODE

_logger = logging.getLogger(__name__)


class Frame:
    """One open `with`. `owner` is the object that opened it."""

    takes_all_threads = False
    hides_outer = False

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def activate(self) -> None:
        """Makes this frame the one that torch sees; all or nothing."""

    def deactivate(self) -> None:
        """Undoes `activate`."""

    def close(self) -> None:
        """Gives back what the frame holds."""


class OrdinaryFrame(Frame):
    """Ordinary memory for this thread: `saver.disabled()`, and captures, whose memory is the graph's."""

    hides_outer = True

    def __init__(self, owner: object) -> None:
        super().__init__(owner)
        self._backend = pools.existing_backend()
        self._token: Any = None

    def activate(self) -> None:
        if self._backend is not None:
            self._token = self._backend.suspend()

    def deactivate(self) -> None:
        if self._backend is not None:
            self._backend.restore(self._token)


class RegionPolicy(NamedTuple):
    """What a region says of the memory inside. `backup` and `overflow` are the core's codes."""

    tag: str
    backup: int
    retain: bool
    overflow: int = NO_OVERFLOW_CODE


class RegionFrame(Frame):
    """A lease on a tag, and one of its pools for each device."""

    def __init__(
        self, owner: object, backend: pools.PoolBackend, policy: RegionPolicy, takes_all_threads: bool
    ) -> None:
        super().__init__(owner)
        self.takes_all_threads = takes_all_threads
        self._backend = backend
        self._tag = None if policy.overflow == NO_OVERFLOW_CODE else policy.tag
        flushes_first = policy.overflow != NO_OVERFLOW_CODE and backend.flushes_first
        self._keys = [
            PoolKey(policy.tag, policy.backup, device, policy.retain, policy.overflow, flushes_first)
            for device in backend.devices()
        ]
        self._lent: list[LentPool] = []
        for key in self._keys:
            shelf.slot(key)
        self._make_fast()
        self._lease = _core.open_lease(policy.tag, holder_name())
        reaches_all_threads = takes_all_threads or backend.one_thread_only
        try:
            if self._lease.is_away:
                dead.give_up([policy.tag])
            for key in self._keys:
                self._lent.append(shelf.take(backend, key, self._lease, takes_all_threads=reaches_all_threads))
            restore_trimmed(policy.tag, self._lent)
        except BaseException:
            self.close()
            raise

    def activate(self) -> None:
        enter, leave = self._verbs()
        entered = 0
        try:
            for lent in self._lent:
                enter(lent.pool)
                entered += 1
        except BaseException:
            for lent in reversed(self._lent[:entered]):
                leave(lent.pool)
            raise

    def deactivate(self) -> None:
        for lent in reversed(self._lent):
            self._verbs()[1](lent.pool)

    def close(self) -> None:
        while self._lent:
            shelf.give_back(self._keys[len(self._lent) - 1], self._lent.pop())
        _core.close_lease(self._lease.id)
        self._make_fast()

    def _make_fast(self) -> None:
        # Of an earlier spike: memory that torch would hand out again, and that need not be slow any more.
        if self._tag is None:
            return
        try:
            spilled.make_fast(self._tag)
        except (Error, RuntimeError) as error:  # torch's own are RuntimeErrors: of a device that is broken, say
            _logger.debug("free memory that has spilled stays where it is: %r", error)

    def _verbs(self) -> tuple[Any, Any]:
        if self.takes_all_threads:
            return self._backend.enter_all, self._backend.leave_all
        return self._backend.enter, self._backend.leave


def visible_frames(frames: list[Frame], inner_beats_all: bool) -> list[Frame]:
    """Which of a thread's frames torch is to see, outermost first."""
    if not frames:
        return []
    top = frames[-1]
    if inner_beats_all and not top.takes_all_threads and not top.hides_outer:
        for frame in reversed(frames[:-1]):
            if frame.hides_outer:
                break
            if frame.takes_all_threads:
                return [frame, top]
    return [top]


class FrameStack:
    """The open frames of one thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._process = os.getpid()
        self.frames: list[Frame] = []
        self._active: list[Frame] = []

    def __del__(self) -> None:
        # The thread ended inside regions. Its number may be given to another thread, whose allocations torch would then
        # take for this one's. At interpreter exit and in a forked child there is nothing to put right.
        if sys.is_finalizing() or os.getpid() != self._process:
            return
        while self.frames:
            with contextlib.suppress(Exception):
                self.pop(self.frames[-1])
        _region_threads.forget(self.thread)

    def push(self, frame: Frame) -> None:
        """Makes `frame` the innermost one. On failure all is as before, but for the frame, which is closed."""
        self.frames.append(frame)
        try:
            self._show_visible()
        except BaseException:
            self.frames.remove(frame)
            try:
                self._show_visible()
            finally:
                frame.close()
            raise

    def pop(self, frame: Frame) -> None:
        """Closes `frame`, which need not be the innermost one: generators end when they like."""
        self.frames.remove(frame)
        try:
            self._show_visible()
        finally:
            frame.close()

    def discard(self, frame: Frame) -> None:
        """As `pop`, also from another thread (a finalizer, say); torch learns of it at the thread's next region."""
        if frame not in self.frames:
            return
        if threading.get_ident() == self.thread:
            self.pop(frame)
        else:
            self.frames.remove(frame)

    def reenter(self) -> None:
        """Leaves and enters what torch sees of this thread: it then goes before a pool that was opened since."""
        while self._active:
            self._active[-1].deactivate()
            self._active.pop()
        self._show_visible()

    def find(self, owner: object) -> Frame | None:
        """The innermost frame that `owner` opened."""
        return next((frame for frame in reversed(self.frames) if frame.owner is owner), None)

    def _show_visible(self) -> None:
        backend = pools.existing_backend()
        wanted = visible_frames(self.frames, backend is not None and backend.inner_beats_all)
        common = 0
        while common < min(len(wanted), len(self._active)) and wanted[common] is self._active[common]:
            common += 1
        while len(self._active) > common:
            self._active[-1].deactivate()
            self._active.pop()
        for frame in wanted[common:]:
            frame.activate()
            self._active.append(frame)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack = FrameStack()


class _RegionThreads:
    """How many regions each thread has open, for the torch versions that cannot keep two threads' apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    def enter(self, one_thread_only: bool) -> None:
        thread = threading.get_ident()
        with self._lock:
            if one_thread_only and any(other != thread for other in self._counts):
                raise StateError(
                    "with torch before 2.8, regions of two threads at once would take each other's tensors: "
                    "open one at a time, or upgrade torch"
                )
            self._counts[thread] = self._counts.get(thread, 0) + 1

    def forget(self, thread: int) -> None:
        with self._lock:
            self._counts.pop(thread, None)

    def others(self) -> list[int]:
        with self._lock:
            return [thread for thread in self._counts if thread != threading.get_ident()]

    def leave(self) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._counts[thread] -= 1
            if not self._counts[thread]:
                del self._counts[thread]


_state = _ThreadState()
_region_threads = _RegionThreads()
_is_forked_child = False


def this_thread() -> FrameStack:
    """The calling thread's stack."""
    return _state.stack


def other_threads_in_regions() -> list[int]:
    """The numbers of the threads, but for the calling one, that have a region open."""
    return _region_threads.others()


def enable_check_if_asked() -> None:
    """EBBTIDE_CHECK=1: from now on this thread's torch ops are looked at."""
    if os.environ.get("EBBTIDE_CHECK"):
        from ebbtide.saver import check

        check.enable_if_asked()


def open_region(owner: object, policy: RegionPolicy, takes_all_threads: bool) -> None:
    """Opens a region in this thread; no-op where ebbtide is off. Raises what its parts raise, leaving nothing open."""
    backend = pools.backend()
    if backend is None:
        return
    if _is_forked_child:
        raise StateError(
            "this process is a fork of one that used ebbtide, and a GPU does not survive a fork: "
            "start it with the spawn method"
        )
    enable_check_if_asked()
    _region_threads.enter(backend.one_thread_only)
    try:
        this_thread().push(RegionFrame(owner, backend, policy, takes_all_threads))
    except BaseException:
        _region_threads.leave()
        raise


def close_frame(owner: object) -> None:
    """Closes the innermost frame that `owner` opened in this thread; no-op where opening it was one.

    Raises:
        StateError: another thread opened it.
    """
    stack = this_thread()
    frame = stack.find(owner)
    if frame is None:
        if driver_choice.is_off() or _is_forked_child:
            return
        raise StateError("another thread entered this: leave it in the thread that entered it")
    try:
        stack.pop(frame)
    finally:
        if isinstance(frame, RegionFrame):
            _region_threads.leave()


def _forget_parent() -> None:
    global _is_forked_child, _state, _region_threads
    _is_forked_child = pools.existing_backend() is not None
    _state = _ThreadState()
    _region_threads = _RegionThreads()
    shelf.renew_lock()


os.register_at_fork(after_in_child=_forget_parent)
