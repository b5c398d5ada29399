"""Progress of long operations, for `saver.configure(progress=)`.

An operation only notes that it runs. One thread, which starts with the first operation that is watched and ends when
there were none for some seconds, looks at what runs, asks the core how much has moved, and calls the program or draws.
So an operation never waits for a callback, and where nobody would see progress, no thread starts. Only the end of an
operation whose bar is drawn waits until the bar is gone, so that what the program prints next has a line of its own.

No lock is held while a callback runs. In a forked child nothing is shown.
"""

import _thread
import atexit
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinMethodType, MethodType
from typing import Any, TypeAlias

from ebbtide import _core, logs
from ebbtide.errors import Error
from ebbtide.locks import make_condition, make_lock, make_signal
from ebbtide.saver.state.known_tags import allocations_of, find_tags
from ebbtide.saver.telling import bars, terminal
from ebbtide.saver.values.progress import Progress

Display: TypeAlias = Callable[[Progress], object] | bool | None

CALLBACK_SECONDS = 0.1  # an operation is told to a callback from this age on
BAR_SECONDS = 1.0
POLL_SECONDS = 0.1
LINGER_SECONDS = 10.0
ERASE_SECONDS = 5.0  # a terminal that takes nothing holds the end of an operation up for this long

_lock = make_lock()
_changed = make_condition(_lock)
_keys = itertools.count()
_running: "dict[int, _Operation]" = {}
_ended: "list[_Operation]" = []  # those that were shown and are over
_watcher: object = None  # stands for the thread that is to go on
_display: Display = None
_is_child = False


class _Operation:
    """One that runs. Only the thread that shows it touches what has no comment."""

    def __init__(
        self, operation: str, leaving: Sequence[str], returning: Sequence[str], pending: "_core.Pending | None"
    ) -> None:
        self.key = next(_keys)
        self.operation, self.leaving, self.returning, self.pending = operation, leaving, returning, pending
        self.start = time.monotonic()
        self.display = _display  # as it was when the operation began
        self.is_shown = False  # whoever ends the operation reads it, under the lock
        self.has_succeeded = False
        self.drawn: Any = None  # a signal that the bar is gone; None where none was drawn
        self.ranges: list[tuple[int, int]] | None = None
        self.total_bytes = 0

    def is_due(self) -> bool:
        age = time.monotonic() - self.start
        return age >= (CALLBACK_SECONDS if callable(self.display) else BAR_SECONDS)

    def measure(self) -> Progress:
        done, total = self._count_pending() if self.pending is not None else self._count_tags()
        self.total_bytes = total
        return self.progress(min(done, total))

    def progress(self, done_bytes: int) -> Progress:
        tags = (*self.leaving, *self.returning)
        return Progress(self.operation, tags, done_bytes, self.total_bytes, time.monotonic() - self.start)

    def _count_pending(self) -> tuple[int, int]:
        assert self.pending is not None
        if self.ranges is None:
            self.ranges = [(info.address, info.size_bytes) for info in allocations_of(self.returning)]
        done = sum(size for address, size in self.ranges if self.pending.is_ready(address, size))
        return done, sum(size for _, size in self.ranges)

    def _count_tags(self) -> tuple[int, int]:
        if self.operation == "swap":
            sides = [("pause", self.leaving), ("resume", self.returning)]
        else:
            sides = [(self.operation, self.leaving or self.returning)]
        counts = [_COUNTS[kind](info) for kind, names in sides for info in find_tags(names).values()]
        return sum(done for done, _ in counts), sum(total for _, total in counts)


def _count_paused(info: "_core.TagInfo") -> tuple[int, int]:
    return info.stored_bytes + info.dropped_bytes + info.left_bytes, info.size_bytes - info.trimmed_bytes


def _count_resumed(info: "_core.TagInfo") -> tuple[int, int]:
    return info.resident_bytes - info.left_bytes, info.size_bytes - info.trimmed_bytes


_COUNTS: "dict[str, Callable[[_core.TagInfo], tuple[int, int]]]" = {
    "pause": _count_paused,
    "resume": _count_resumed,
    "prepare": lambda info: (info.ahead_bytes, info.resident_bytes),
    "promote": lambda info: (info.resident_bytes - info.host_bytes, info.resident_bytes),
    "demote": lambda info: (info.host_bytes, info.resident_bytes),
}


class _Watched(_core.Scope):
    def __init__(self, operation: str, leaving: Sequence[str], returning: Sequence[str]) -> None:
        self._operation = _Operation(operation, leaving, returning, None)

    def _open(self) -> None:
        _note(self._operation)

    def _close(self) -> None:
        _end(self._operation, self._failure is None)
        _wait_until_erased(self._operation)


_UNWATCHED = nullcontext()


def watched(
    operation: str, leaving: Sequence[str] = (), returning: Sequence[str] = ()
) -> AbstractContextManager[object]:
    """For a `with`: shows the progress of an operation while the block runs, if anybody is to see it."""
    return _Watched(operation, leaving, returning) if _is_wanted() else _UNWATCHED


def watch_pending(core: "_core.Pending", names: Sequence[str]) -> None:
    """Shows the progress of a resume that goes on by itself."""
    if _is_wanted() and not core.is_over():
        _note(_Operation("resume", (), names, core))


def settle_pending(core: "_core.Pending") -> None:
    """For a resume of `watch_pending` that is over: its bar is gone when this returns."""
    with _lock:
        known = (*_running.values(), *_ended)
    for operation in [each for each in known if each.pending is core]:
        _end(operation, _has_succeeded(core))
        _wait_until_erased(operation)


def check_display(value: object) -> None:
    """Raises TypeError for what `configure(progress=)` does not take."""
    if value is not None and not isinstance(value, bool) and not callable(value):
        raise TypeError(f"progress must be a callable, True, False or None, not {type(value).__name__}")


def set_display(value: Display) -> None:
    """What operations that begin from now on show."""
    global _display
    _display = value


def display() -> Display:
    """What `set_display` set."""
    return _display


def _is_current(shown: Display) -> bool:
    """Whether it is what is set now. Each look at a method makes another object, which equals the first."""
    is_method = isinstance(shown, MethodType | BuiltinMethodType) and type(shown) is type(_display)
    return shown is _display or (is_method and shown == _display)


def _is_wanted() -> bool:
    if _display is None:
        return terminal.is_terminal(sys.stderr) and not _is_child
    return _display is not False and not _is_child


def _note(operation: _Operation) -> None:
    global _watcher
    with _lock:
        _running[operation.key] = operation
        if _watcher is not None:
            return
        own = object()
        try:
            _watcher = own
            # Not a threading.Thread, whose start waits for the thread, and can turn an interrupt into a RuntimeError.
            _thread.start_new_thread(_watch, (own,))
        except RuntimeError:  # the system starts no thread, or the interpreter is about to end
            _watcher = None
            del _running[operation.key]
        except BaseException:  # an interrupt: if the thread has started, it finds that it is not the watcher
            _watcher = None
            raise


def _end(operation: _Operation, has_succeeded: bool) -> None:
    with _lock:
        if _running.get(operation.key) is None:
            return
        operation.has_succeeded = has_succeeded
        if operation.is_shown and _watcher is not None:
            if not callable(operation.display):
                operation.drawn = make_signal()
            _ended.append(operation)
            _changed.notify_all()
        del _running[operation.key]


def _wait_until_erased(operation: _Operation) -> None:
    drawn = operation.drawn
    if drawn is not None:
        drawn.acquire(timeout=ERASE_SECONDS)
        operation.drawn = None


def _note_erased(operation: _Operation) -> None:
    drawn = operation.drawn
    if drawn is not None and drawn.locked():
        drawn.release()


def _watch(own: object) -> None:
    global _watcher
    try:
        threading.current_thread().name = "ebbtide-progress"
        _show_all(own)
    finally:  # whatever ended it, the next operation starts another, and nobody waits for this one
        with _lock:
            if _watcher is own:
                _watcher = None
                for each in _ended:
                    _note_erased(each)
                _ended.clear()
            _changed.notify_all()


def _show_all(own: object) -> None:
    drawn: bars.Bars | None = None
    last_seconds = time.monotonic()
    while True:
        with _lock:
            if not _ended:
                _changed.wait(POLL_SECONDS)
            if _is_over(own, last_seconds):
                return
            ended, running = list(_ended), list(_running.values())
            due = list(filter(_Operation.is_due, running))
            for each in due:
                each.is_shown = True
            if running or ended:
                last_seconds = time.monotonic()
        for each in due:
            if each.pending is not None and each.pending.is_over():
                _end(each, _has_succeeded(each.pending))
            else:
                drawn = _show(each, drawn)
        for each in ended:
            _finish(each, drawn)
            _note_erased(each)
        with _lock:
            del _ended[: len(ended)]
            _changed.notify_all()


def _has_succeeded(core: "_core.Pending") -> bool:
    try:
        core.wait()  # at once, since it is over
    except Error:
        return False
    return True


def _is_over(own: object, last_seconds: float) -> bool:
    global _watcher
    if _watcher is not own:
        return True
    if _running or _ended or time.monotonic() - last_seconds < LINGER_SECONDS:
        return False
    _watcher = None  # under the lock that an operation takes to note itself: it finds a thread that sees it, or none
    return True


def _show(operation: _Operation, drawn: bars.Bars | None) -> bars.Bars | None:
    with _Guard(operation):
        progress = operation.measure()
        if callable(operation.display):
            if _is_current(operation.display):  # not one that failed, or was replaced, meanwhile
                operation.display(progress)
        else:
            if drawn is None or drawn.is_of_another_stream():
                drawn = bars.make_bars(is_forced=operation.display is True)
            if drawn is not None:
                drawn.show(operation.key, progress)
            elif operation.display is not None:
                raise ImportError("neither rich nor tqdm is installed")
    return drawn


def _finish(operation: _Operation, drawn: bars.Bars | None) -> None:
    with _Guard(operation):
        if not callable(operation.display):
            if drawn is not None:
                drawn.end(operation.key)
        elif operation.has_succeeded and _is_current(operation.display):
            operation.display(operation.progress(operation.total_bytes))


class _Guard:
    """Turns progress off after an exception, and reports it once."""

    def __init__(self, operation: _Operation) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return True
        if _is_current(self._operation.display):
            set_display(False)
            logs.warn_of(error, f"progress is off from now on, since it failed: {error!r}")
        return True


def _settle() -> None:
    """Waits until the bars of operations that are over are gone, so that the terminal is as it was."""
    global _watcher
    with _lock:
        _changed.wait_for(lambda: not _ended or _watcher is None, timeout=1)
        _watcher = None  # what still runs is shown no more, and the thread may end at any time
    terminal.uninstall()


def forget_parent() -> None:
    """In a forked child (`ebbtide.locks`)."""
    global _is_child, _watcher
    _is_child, _watcher = True, None
    _running.clear()
    _ended.clear()
    terminal.uninstall()


atexit.register(_settle)
