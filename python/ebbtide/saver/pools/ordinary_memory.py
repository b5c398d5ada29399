"""Frames, which a `with` opens in its thread, and the frame that gives ordinary memory.

Everything here prepares a `_core.Frame` and may be interrupted anywhere. C closes the frame if the preparation fails,
and otherwise shows it to torch in one step (csrc/bindings/scopes.cpp).
"""

import sys

from ebbtide import _core, driver_choice
from ebbtide.errors import StateError
from ebbtide.saver.pools import backends


def running_task() -> int:
    """The id of the asyncio task that runs in this thread; 0 outside of one."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return 0
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs
        return 0
    return 0 if task is None else id(task)


def prepare_ordinary(frame: "_core.Frame") -> bool:
    """Fills the frame with ordinary memory for this thread; False where ebbtide is off.

    For `saver.disabled()`, and for captures, whose memory belongs to the graph.
    """
    if driver_choice.is_off():
        return False
    frame.task = running_task()
    frame.hides_outer = True
    backend = backends.existing_backend()
    if backend is not None:
        frame.beats_all = backend.inner_beats_all
        for use in backend.suspension():
            frame.add_use(*use)
    return True


def prepare_separate(frame: "_core.Frame", separation: backends.Separation, beats_all: bool) -> None:
    """Fills the frame with memory of its own, which is not tagged."""
    frame.task = running_task()
    frame.leave_thread_untagged()
    frame.hides_outer = True
    frame.beats_all = beats_all
    for use in separation.uses:
        frame.add_use(*use)


class FrameScope(_core.AllocationScope):
    """A `with` that opens a frame in its thread. It may be nested in itself and entered by several threads.

    A subclass has `_prepare(frame)`, which C calls: it fills the frame, or returns False if there is nothing to open.
    """

    def _refuse_exit(self, is_open_elsewhere: bool) -> None:
        """Refuses to leave a scope that this thread is not in. Does nothing where entering it was a no-op.

        Raises:
            StateError: says why.
        """
        if driver_choice.is_off() or backends.is_forked_child():
            return
        if is_open_elsewhere:
            raise StateError("another thread entered this: leave it in the thread that entered it")
        raise StateError("this thread is not inside: it has left already, or never entered")


class OrdinaryMemory(FrameScope):
    """A `with` that gives this thread ordinary memory."""

    def _prepare(self, frame: "_core.Frame") -> bool:
        return prepare_ordinary(frame)
