"""Raises an interrupt at every point where Python may raise one: where a call returns, and where a function begins."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

POINTS = ("call", "return", "c_return")
MOST_POINTS = 20_000


class Planted(KeyboardInterrupt):
    """Stands in for the KeyboardInterrupt of a Ctrl-C."""


def _is_of_import(frame: Any) -> bool:
    """An interrupt between the taking of Python's import lock and the `try` after it leaves the lock taken, a fault of
    Python's own: every later import in another thread would wait for ever.
    """
    return frame.f_code.co_filename.startswith("<frozen importlib")


class AtPoint:
    """A profile function that raises at the k-th point of this thread. Python removes a profile function that has
    raised."""

    def __init__(self, k: int) -> None:
        self.left = k

    def __call__(self, frame: Any, event: str, _arg: Any) -> None:
        if event in POINTS and not _is_of_import(frame):
            self.left -= 1
            if self.left == 0:
                raise Planted


@contextmanager
def second_at_call(j: int) -> Iterator[None]:
    """Raises inside the block where the j-th function begins. It uses the trace function, because the profile function
    may be in use."""
    left = j

    def trace(frame: Any, event: str, _arg: Any) -> None:
        nonlocal left
        if event == "call" and not _is_of_import(frame):
            left -= 1
            if left == 0:
                raise Planted

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted_everywhere(work: Callable[[], Any], check: Callable[[], None]) -> int:
    """Runs `work` once for each of its points, interrupted there, and `check` after each run. Returns the number of
    points."""
    for k in itertools.count(1):
        assert k < MOST_POINTS
        at = AtPoint(k)
        was_interrupted = False
        lost: list[Any] = []
        hook, sys.unraisablehook = sys.unraisablehook, lost.append
        sys.setprofile(at)
        try:
            work()
        except Planted:
            was_interrupted = True
        finally:
            sys.setprofile(None)
            sys.unraisablehook = hook
        try:
            check()
        except BaseException as error:
            error.add_note(f"after an interrupt at point {k}") if hasattr(error, "add_note") else None
            raise
        # Python itself reports and drops exceptions while a generator or a weak reference dies. Our own code drops
        # none.
        assert all(not isinstance(entry.object, str) for entry in lost), lost
        assert was_interrupted or at.left > 0 or lost, "an interrupt was lost"
        if at.left > 0:
            return k - 1
    raise AssertionError
