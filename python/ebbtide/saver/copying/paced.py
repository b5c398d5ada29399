"""Copies ahead of a pause: used memory goes to its backup in short steps, and the pause copies the later changes.

A step holds its tag for some milliseconds. So a pause or the beginning of a capture waits that long at most, and tells
no copy of itself: a step does not find memory that has left or was freed. Memory that is freed during a step goes
back at its end; an allocation that needs it waits for that. A step that opens a pinned backup pins all of it first.

A thread that copies beside the program sleeps between two steps: a quarter of the step's duration, and several times as
long as that where the step was slow, since then the program uses the bus itself. csrc/DESIGN.md has the figures.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.locks import make_lock
from ebbtide.saver.reclaim.look import Look
from ebbtide.saver.state.known_tags import check_known, find_tags
from ebbtide.saver.values.arguments import PauseRequest
from ebbtide.saver.values.reports import Report

_LARGE_STEP = 256 << 20  # where the program waits for it
_SMALL_STEP = 32 << 20
_THREADS_BESIDE = 4  # at most: the core takes a quarter of the cores

# Rests, as multiples of the step's duration. A step is slowed down by the program's own copies where it has less than
# this share of the best rate of its tag so far; a tag mostly has backups of one kind, and kinds differ in their rates.
_REST = 0.25
_FAIR_SHARE = 0.6
_REST_IF_SLOWED = 4.0
_LEAST_SLEEP = 0.001  # so that an operation that waits for the tag gets it
LONGEST_SLEEP = 0.05
_CAPTURE_POLL = 0.01


def known(names: Sequence[str], missing_ok: bool) -> list[str]:
    """Those of these tags (none: all) that a region ever named.

    Raises:
        StateError: there are others, and missing_ok is False.
    """
    if not missing_ok:
        check_known(names)
    return list(find_tags(names))


def copy_now(names: Sequence[str]) -> Report:
    """Copies all that these tags have on the device and their backups do not, as fast as a pause would.

    Raises:
        StateError: a capture under way; copied blocks stay.
        StoreError, DriverError: as in `prepare`; copied blocks stay.
    """
    start = time.monotonic()
    reports = []
    for name in names:
        for copying, report in _steps(name, _LARGE_STEP, 0):
            if copying.is_held_up:
                raise StateError("a stream capture is under way, and copies would break it: copy before or after")
            reports.append(report)
    return Report.joined("prepare", reports, time.monotonic() - start)


def _steps(name: str, step_bytes: int, threads: int) -> "Iterator[tuple[_core.CopyAhead, Report]]":
    copying = _core.CopyAhead(name, step_bytes, threads, Look([name]).unused(PauseRequest([name]))[0])
    while not copying.is_over:
        yield copying, Report.from_core(copying.step())


class PacedCopy:
    """Copies in the calling thread with rests, so that the program's own copies go first. `stop` ends it from any
    thread.

    Rests are short, so that a flag is enough: a lock might be held at a fork.
    """

    def __init__(self) -> None:
        self._best_rates: dict[str, float] = {}  # by tag
        self._thread: threading.Thread | None = None
        with _lock:
            self.is_stopped = _is_ending
            _copies.add(self)

    def start(self, thread: threading.Thread) -> None:
        """Starts the daemon thread that it copies in. The end of the interpreter stops it, and waits for its step.

        Raises:
            RuntimeError: the system starts no thread, or the interpreter is about to end.
        """
        with _lock:
            if _is_ending:
                raise RuntimeError("the interpreter is about to end: no more copies begin")
            self._thread = thread  # first: an interrupt may end `start` once the thread runs
        thread.start()  # without the lock: it waits for the thread, in which a finalizer may start another one

    def end(self) -> None:
        """Stops it and waits for its thread."""
        self.stop()
        if self._thread not in (None, threading.current_thread()):
            with contextlib.suppress(RuntimeError):  # it never started
                self._thread.join()

    def stop(self) -> None:
        """Ends the copying after its present step."""
        self.is_stopped = True

    def copy(self, names: Sequence[str], is_wanted: Callable[[], bool] = lambda: True) -> Report:
        """As copy_now, with rests; waits for the end of captures.

        Args:
            is_wanted: asked after each step; False ends the copying, as `stop` does.

        Raises:
            StateError, StoreError, DriverError: as in copy_now.
        """
        start = time.monotonic()
        reports = []
        for name in names:
            if self.is_stopped:  # also before the first step: the interpreter may be ending
                break
            before = time.monotonic()
            for copying, report in _steps(name, _SMALL_STEP, _THREADS_BESIDE):
                if not copying.is_held_up:
                    reports.append(report)
                if self.is_stopped or not is_wanted():
                    break
                taken = time.monotonic() - before
                time.sleep(_CAPTURE_POLL if copying.is_held_up else self._rest_after(name, report.copied, taken))
                before = time.monotonic()
        return Report.joined("prepare", reports, time.monotonic() - start)

    def _rest_after(self, name: str, copied: int, seconds: float) -> float:
        is_slowed = False
        if copied >= _SMALL_STEP // 2:  # else too little to tell a rate
            rate = copied / max(seconds, 1e-9)
            best = self._best_rates.get(name, 0.0)
            is_slowed = rate < _FAIR_SHARE * best
            self._best_rates[name] = max(rate, 0.99 * best)
        rest = seconds * (_REST_IF_SLOWED if is_slowed else _REST)
        return min(max(rest, _LEAST_SLEEP), LONGEST_SLEEP)


# Those that may be copying when the interpreter ends: their threads are daemons, which must not be in the core then.
_lock = make_lock()
_copies: "weakref.WeakSet[PacedCopy]" = weakref.WeakSet()
_is_ending = False


def _end_all(process: int = os.getpid()) -> None:
    global _is_ending
    if os.getpid() != process:
        return
    with _lock:
        _is_ending = True
        copies = list(_copies)
    for each in copies:
        each.stop()
    for each in copies:
        each.end()


atexit.register(_end_all)
