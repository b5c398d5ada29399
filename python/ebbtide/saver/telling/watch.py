"""Progress of long operations, for `saver.configure(progress=)`: a callback, or a bar of rich on a terminal.

Each operation has a thread of its own, which asks the core how much has moved, and calls the program or draws. So an
operation never waits for a callback. Only one whose bar is drawn waits at its end until the bar is gone, so that the
program's next line stands alone. Where nothing would be shown, no thread starts.
"""

import _thread
import atexit
import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

from ebbtide import _core, logs
from ebbtide.errors import Error
from ebbtide.locks import make_lock, make_signal
from ebbtide.saver.state.known_tags import allocations_of, find_tags
from ebbtide.saver.values.progress import Progress

Display: TypeAlias = Callable[[Progress], object] | Literal[False] | None

CALLBACK_SECONDS = 0.1  # the least age of an operation that a callback hears of
BAR_SECONDS = 1.0
POLL_SECONDS = 0.1
ERASE_SECONDS = 5.0  # the longest wait for a terminal that takes nothing

_lock = make_lock()  # held by the thread that draws
_display: Display = None
_watches: "dict[object, _Watch]" = {}  # those whose thread runs, by their core.Pending where they have one


class _Watch(_core.Scope):
    """A `with` around an operation, which shows its progress. With `pending`, it is used without a `with`."""

    def __init__(
        self,
        operation: str,
        leaving: Sequence[str],
        returning: Sequence[str],
        pending: "_core.Pending | None" = None,
    ) -> None:
        self._operation, self._leaving, self._returning, self._pending = operation, leaving, returning, pending
        self._start = time.monotonic()
        self._display = _display  # as it was when the operation began
        self._over, self._erased = make_signal(), make_signal()
        self._is_over = self._has_succeeded = self._is_drawn = False
        self._total_bytes = 0

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # the system starts no thread: nothing is shown
            # Not a threading.Thread, whose start waits for the thread, and can turn an interrupt into a RuntimeError.
            _thread.start_new_thread(self._run, ())

    def _close(self) -> None:
        self.end(self._failure is None)

    def end(self, has_succeeded: bool) -> None:
        """Says that the operation is over. Returns once its bar is gone."""
        self._has_succeeded, self._is_over = has_succeeded, True
        if self._over.locked():
            self._over.release()
        if self._is_drawn:
            self._erased.acquire(timeout=ERASE_SECONDS)

    def _run(self) -> None:
        key = self if self._pending is None else self._pending
        _watches[key] = self
        try:
            self._follow()
        except BaseException as error:
            if _display == self._display:
                set_display(False)
                logs.warn_of(error, f"progress is off from now on, since it failed: {error!r}")
        finally:
            _watches.pop(key, None)  # a child that a callback forked has none
            self._is_drawn = False
            self._erased.release()

    def _follow(self) -> None:
        try:
            is_shown = self._show_until_over()
        finally:
            if self._is_drawn:
                with _lock:
                    _bars.remove(self)
        if is_shown and self._has_succeeded and callable(self._display):
            self._show(self._progress(self._total_bytes))

    def _show_until_over(self) -> bool:
        """Whether it took long enough to be shown."""
        delay = CALLBACK_SECONDS if callable(self._display) else BAR_SECONDS
        is_shown = False
        while not (self._over.acquire(timeout=delay) or self._is_pending_over()):
            self._show(self._measure())
            delay, is_shown = POLL_SECONDS, True
        return is_shown

    def _is_pending_over(self) -> bool:
        if self._pending is None or not self._pending.is_over():
            return False
        self._has_succeeded = _has_succeeded(self._pending)
        return True

    def _show(self, progress: Progress) -> None:
        if not callable(self._display):
            with _lock:
                self._is_drawn = True
                if not self._is_over:
                    _bars.draw(self, progress)
        elif _display == self._display:  # not one that failed, or was replaced, meanwhile
            self._display(progress)

    def _progress(self, done_bytes: int) -> Progress:
        tags = (*self._leaving, *self._returning)
        return Progress(self._operation, tags, done_bytes, self._total_bytes, time.monotonic() - self._start)

    def _measure(self) -> Progress:
        if self._pending is not None:
            ranges = [(info.address, info.size_bytes) for info in allocations_of(self._returning)]
            counts = [(size if self._pending.is_ready(address, size) else 0, size) for address, size in ranges]
        else:
            if self._operation == "swap":
                sides = [("pause", self._leaving), ("resume", self._returning)]
            else:
                sides = [(self._operation, self._leaving or self._returning)]
            counts = [_COUNTS[kind](info) for kind, names in sides for info in find_tags(names).values()]
        self._total_bytes = sum(total for _, total in counts)
        return self._progress(min(sum(done for done, _ in counts), self._total_bytes))


# By operation: how many bytes of a tag are where it moves them, and of how many.
_COUNTS: "dict[str, Callable[[_core.TagInfo], tuple[int, int]]]" = {
    "pause": lambda info: (
        info.stored_bytes + info.dropped_bytes + info.paused_host_bytes,
        info.size_bytes - info.trimmed_bytes,
    ),
    "resume": lambda info: (info.resident_bytes - info.paused_host_bytes, info.size_bytes - info.trimmed_bytes),
    "prepare": lambda info: (info.ahead_bytes, info.resident_bytes),
    "promote": lambda info: (info.resident_bytes - info.host_bytes, info.resident_bytes),
    "demote": lambda info: (info.host_bytes, info.resident_bytes),
}


class _Bars:
    """The bars on stderr, in one display of rich, since a terminal takes one at a time."""

    def __init__(self) -> None:
        self._live: Any = None
        self._tasks: dict[_Watch, Any] = {}

    def draw(self, watch: _Watch, progress: Progress) -> None:
        if self._live is None:
            self._live = _make_live()
            self._live.start()
        if watch not in self._tasks:
            names = " ".join(("ebbtide", progress.operation, *progress.tags[:3]))
            self._tasks[watch] = self._live.add_task(names + " ..." * (len(progress.tags) > 3), total=None, age="")
        total = progress.total_bytes if progress.done_bytes else None  # a bar pulses while nothing is known
        age = datetime.timedelta(seconds=int(progress.seconds))
        self._live.update(self._tasks[watch], completed=progress.done_bytes, total=total, age=age, refresh=True)

    def remove(self, watch: _Watch) -> None:
        task = self._tasks.pop(watch, None)
        if not self._tasks:
            self.stop()
        elif task is not None:
            self._live.remove_task(task)

    def stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _make_live() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[age]}", style="progress.elapsed"),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


_bars = _Bars()
_UNWATCHED = nullcontext()


def watched(
    operation: str, leaving: Sequence[str] = (), returning: Sequence[str] = ()
) -> AbstractContextManager[object]:
    """For a `with`: shows the progress of an operation while the block runs, if a display is set or stderr is a
    terminal."""
    return _Watch(operation, leaving, returning) if _is_wanted() else _UNWATCHED


def watch_pending(core: "_core.Pending", names: Sequence[str]) -> None:
    """Shows the progress of a resume in the background."""
    if _is_wanted() and not core.is_over():
        _Watch("resume", (), names, core)._open()


def settle_pending(core: "_core.Pending") -> None:
    """For a resume of `watch_pending` that is over: its bar is gone when this returns."""
    watch = _watches.get(core)
    if watch is not None:
        watch.end(_has_succeeded(core))


def check_display(value: object) -> None:
    """Raises TypeError for anything that `configure(progress=)` does not take."""
    if value is not None and value is not False and not callable(value):
        raise TypeError(f"progress must be a callable, False or None, not {value!r}")


def set_display(value: Display) -> None:
    """Sets the display of operations that begin from now on."""
    global _display
    _display = value


def display() -> Display:
    """The value that `set_display` set."""
    return _display


def _is_wanted() -> bool:
    if _display is not None:
        return _display is not False
    try:
        return sys.stderr is not None and bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # an object of the program's own, or it is closed
        return False


def _has_succeeded(core: "_core.Pending") -> bool:
    try:
        core.wait()  # at once, since it is over
    except Error:
        return False
    return True


def _stop_at_exit() -> None:
    if _lock.acquire(timeout=1):  # for good: nothing is drawn any more
        _bars.stop()


def forget_parent() -> None:
    """In a forked child (`ebbtide.locks`)."""
    global _bars
    _bars = _Bars()
    _watches.clear()


atexit.register(_stop_at_exit)
