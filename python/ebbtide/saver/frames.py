"""What a region or `saver.disabled()` makes ready before it is entered.

Everything here prepares a `_core.Frame` and may be interrupted anywhere. The frame owns its leases. C closes it where
the preparation fails, and shows it to torch in one step where it does not (csrc/bindings/scopes.cpp).
"""

import functools
import logging
import os
from typing import NamedTuple

from ebbtide import _core, driver_choice
from ebbtide.errors import Error, StateError
from ebbtide.saver import dead, pools, spilled
from ebbtide.saver.leases import PoolKey, holder_name, restore_trimmed, shelf
from ebbtide.saver.names import NO_OVERFLOW_CODE

_logger = logging.getLogger(__name__)


class RegionPolicy(NamedTuple):
    """What a region says of the memory inside. `backup` and `overflow` are the core's codes."""

    tag: str
    backup: int
    retain: bool
    overflow: int = NO_OVERFLOW_CODE


_is_forked_child = False


def is_forked_child() -> bool:
    """Whether this process is a fork of one that used regions."""
    return _is_forked_child


def enable_check_if_asked() -> None:
    """EBBTIDE_CHECK=1: from now on this thread's torch ops are looked at."""
    if os.environ.get("EBBTIDE_CHECK"):
        from ebbtide.saver import check

        check.enable_if_asked()


def prepare_region(frame: "_core.Frame", policy: RegionPolicy, takes_all_threads: bool) -> bool:
    """Fills the frame with a lease on the tag and one of its pools for each device; False where ebbtide is off.

    Raises:
        StateError: a forked child; what `pools.backend` raises.
        OutOfMemoryError: what was trimmed of the pools does not fit on the device.
    """
    if _is_forked_child:
        raise StateError(
            "this process is a fork of one that used ebbtide, and a GPU does not survive a fork: "
            "start it with the spawn method"
        )
    backend = pools.backend()
    if backend is None:
        return False
    enable_check_if_asked()
    overflows = policy.overflow != NO_OVERFLOW_CODE
    keys = [
        PoolKey(policy.tag, policy.backup, device, policy.retain, policy.overflow, overflows and backend.flushes_first)
        for device in backend.devices()
    ]
    for key in keys:
        shelf.slot(key)
    if overflows:
        frame.after = functools.partial(_make_fast, policy.tag)
        _make_fast(policy.tag)
    if backend.one_thread_only:
        frame.refusal_beside = (
            "with torch before 2.8, regions of two threads at once would take each other's tensors: "
            "open one at a time, or upgrade torch"
        )
    frame.takes_all_threads = takes_all_threads
    frame.beats_all = backend.inner_beats_all
    lease = frame.open_lease(policy.tag, holder_name())
    if lease.is_away:
        dead.give_up([policy.tag])
    reaches_all_threads = takes_all_threads or backend.one_thread_only
    lent = [shelf.take(backend, key, lease, takes_all_threads=reaches_all_threads) for key in keys]
    restore_trimmed(policy.tag, lent)
    for one in lent:
        for use in backend.uses(one.pool, takes_all_threads):
            frame.add_use(*use)
    return True


def prepare_ordinary(frame: "_core.Frame") -> bool:
    """Fills the frame with ordinary memory for this thread: `saver.disabled()`, and captures, whose memory is the
    graph's. False where ebbtide is off."""
    if driver_choice.is_off():
        return False
    frame.hides_outer = True
    backend = pools.existing_backend()
    for use in backend.suspension() if backend is not None else ():
        frame.add_use(*use)
    return True


def _make_fast(tag: str) -> None:
    # Of an earlier spike: memory that torch would hand out again, and that need not be slow any more.
    try:
        spilled.make_fast(tag)
    except (Error, RuntimeError) as error:  # torch's own are RuntimeErrors: of a device that is broken, say
        _logger.debug("free memory that has spilled stays where it is: %r", error)


class FrameScope(_core.AllocationScope):
    """A `with` that opens a frame in its thread. It may be entered again, inside itself and by several threads."""

    def _prepare(self, frame: "_core.Frame") -> bool:
        """Fills the frame; False where there is nothing to open."""
        raise NotImplementedError

    def _refuse_exit(self, is_open_elsewhere: bool) -> None:
        """There is nothing of it in this thread to leave. Nothing, where entering it was a no-op.

        Raises:
            StateError: it says why.
        """
        if driver_choice.is_off() or _is_forked_child:
            return
        if is_open_elsewhere:
            raise StateError("another thread entered this: leave it in the thread that entered it")
        raise StateError("this thread is not inside: it has left already, or never entered")


class OrdinaryMemory(FrameScope):
    """Ordinary memory for this thread."""

    def _prepare(self, frame: "_core.Frame") -> bool:
        return prepare_ordinary(frame)


def _forget_parent() -> None:
    global _is_forked_child
    _is_forked_child = _is_forked_child or pools.existing_backend() is not None


os.register_at_fork(after_in_child=_forget_parent)
