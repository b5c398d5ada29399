"""Keeps tags ahead of their next pause after each resume, in a thread: `saver.configure(copy_ahead=True)`."""

import sys
import threading
import time
import warnings
from collections.abc import Sequence

from ebbtide import _core
from ebbtide.locks import make_lock
from ebbtide.saver.copying.paced import LONGEST_SLEEP, PacedCopy
from ebbtide.saver.state.known_tags import find_tags

_LEAST_REST = 1.0  # seconds between two passes over a tag
_REST = 20.0  # and as a multiple of the pass's duration


class _Keeper:
    """The tags that are kept ahead, and the thread that does."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._due: dict[str, float] = {}  # when the next pass over a tag begins
        self._thread: threading.Thread | None = None
        self._has_news = False

    def keep(self, names: Sequence[str]) -> None:
        # Where a resume named no tag: those that it may have brought back.
        known = [name for name in find_tags(names) if names or _core.pause_count(name) > 0]
        due = dict.fromkeys(known, time.monotonic())
        copying, thread = PacedCopy(), None
        try:
            with self._lock:
                self._due |= due
                self._has_news = True
                if not self._due or (self._thread and (self._thread.ident is None or self._thread.is_alive())):
                    return
                thread = self._thread = threading.Thread(
                    target=self._run, args=(copying,), name="ebbtide-copy-ahead", daemon=True
                )
            copying.start(thread)  # without the lock: it waits for the thread, in which a finalizer may come here first
        except BaseException as error:  # if it has started all the same, it finds that it is not the one
            with self._lock:
                if thread is not None and self._thread is thread:
                    self._thread = None
                    for name in due:
                        self._due.pop(name, None)
            if not isinstance(error, RuntimeError):  # of no thread no pause is worse; an interrupt goes on
                raise

    def _run(self, copying: PacedCopy) -> None:
        while not copying.is_stopped:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                self._has_news = False
                if not self._due:
                    self._thread = None
                    return
                name = min(self._due, key=lambda tag: self._due[tag])
                due = self._due[name]
            wait = due - time.monotonic()
            if wait > 0:
                self._sleep(copying, wait)
                continue
            rest = self._pass(copying, name)
            with self._lock:
                if self._due.get(name) != due:
                    continue  # it was resumed again meanwhile
                if rest is None:
                    del self._due[name]
                else:
                    self._due[name] = time.monotonic() + rest

    def _sleep(self, copying: PacedCopy, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not copying.is_stopped and not self._has_news and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LONGEST_SLEEP))

    def _pass(self, copying: PacedCopy, name: str) -> float | None:
        """One pass over a tag. How long to rest before the next, or None: the tag is no longer kept ahead."""
        try:
            info = _core.query_tag(name)
            if info is None or info.resident_bytes == info.paused_host_bytes + info.kept_bytes or not _is_on():
                return None
            seconds = copying.copy([name], _is_on).seconds
        except Exception as error:
            _say_not_copied(name, error)
            return None
        return max(_LEAST_REST, _REST * seconds)


def _is_on() -> bool:
    return _core.get_setting("copy_ahead") == b"1"


def _say_not_copied(name: str, error: Exception) -> None:
    try:
        warnings.warn(
            f"tag '{name}' is not copied ahead of its next pause, which copies it then: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    except RuntimeWarning as warning:  # warnings are errors: the thread goes on with the other tags
        sys.excepthook(type(warning), warning, warning.__traceback__)


_keeper = _Keeper()


def keep_if_wanted(names: Sequence[str]) -> None:
    """After a resume of these tags (none: all that were ever paused): where `copy_ahead` is on, a thread keeps them
    ahead of a pause."""
    if _is_on():
        _keeper.keep(names)
