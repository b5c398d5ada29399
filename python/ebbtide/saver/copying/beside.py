"""Copies ahead of a pause: what is in use goes to its backup in short steps, and the pause copies what changed since.

A step holds its tag for a few milliseconds. So a pause, a free or the beginning of a capture waits that long at most,
and needs nobody to be told: a step finds what has left, or was freed, no longer there.

A thread that copies beside the program sleeps between two steps: as long as the step took, and several times as long
where the step was slow, since then the program uses the bus itself.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver.reclaim import unused
from ebbtide.saver.state.known_tags import check_known, find_tags
from ebbtide.saver.values.reports import Report

_LARGE_STEP = 256 << 20  # where the program waits for it
_SMALL_STEP = 32 << 20
_THREADS_BESIDE = 2

# What a step needs of the best rate so far, or it counts as slowed down by the program's own copies.
_FAIR_SHARE = 0.6
_SLOWDOWN = 4.0
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
        StateError: a capture under way; what was copied stays.
        StoreError, DriverError: as in `prepare`; what was copied stays.
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
    copying = _core.CopyAhead(name, step_bytes, threads, unused.find_resident([name]))
    while not copying.is_over:
        yield copying, Report.from_core(copying.step())


class Beside:
    """Copies in the calling thread, beside the program, which goes first. `stop` ends it from any thread.

    Rests are short, so that a flag is enough: a lock might be held at a fork.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self._best_rate = 0.0
        _running.add(self)

    def stop(self) -> None:
        """Ends the copying after its present step."""
        self.is_stopped = True

    def copy(self, names: Sequence[str]) -> Report:
        """As copy_now, with rests; waits for the end of captures.

        Raises:
            StateError, StoreError, DriverError: as in copy_now.
        """
        start = time.monotonic()
        reports = []
        for name in names:
            before = time.monotonic()
            for copying, report in _steps(name, _SMALL_STEP, _THREADS_BESIDE):
                if not copying.is_held_up:
                    reports.append(report)
                if self.is_stopped:
                    break
                taken = time.monotonic() - before
                time.sleep(_CAPTURE_POLL if copying.is_held_up else self._rest_after(report.copied, taken))
                before = time.monotonic()
        return Report.joined("prepare", reports, time.monotonic() - start)

    def _rest_after(self, copied: int, seconds: float) -> float:
        if copied < _SMALL_STEP // 2:  # too little to tell a rate
            return min(seconds, LONGEST_SLEEP)
        rate = copied / max(seconds, 1e-9)
        is_slowed = rate < _FAIR_SHARE * self._best_rate
        self._best_rate = max(rate, 0.99 * self._best_rate)
        return min(seconds * (_SLOWDOWN if is_slowed else 1.0), LONGEST_SLEEP)


# Those that may be copying when the interpreter ends: their threads are daemons, which must not be in the core then.
_running: "weakref.WeakSet[Beside]" = weakref.WeakSet()
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start_thread(thread: threading.Thread) -> None:
    """Starts a daemon thread that a `Beside` copies in. The end of the interpreter stops it, and waits for its step.

    Raises:
        RuntimeError: the system starts no thread, or the interpreter is about to end.
    """
    thread.start()
    _threads.add(thread)


def _stop_all(process: int = os.getpid()) -> None:
    if os.getpid() != process:
        return
    for beside in list(_running):
        beside.stop()
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join()


atexit.register(_stop_all)
