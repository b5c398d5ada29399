"""EBBTIDE_CHECK=1: whether a thread's ops are checked. The check itself needs torch, so it is imported only then."""

import os
from collections.abc import Callable, Sequence

from ebbtide import settings

_look_before_pause: Callable[[Sequence[str]], None] | None = None


def are_asked_for() -> bool:
    """Whether EBBTIDE_CHECK is 1. Raises ValueError where it is neither 0 nor 1."""
    return settings.read("check", os.environ) == "1"


def enable_if_asked() -> None:
    """Checks this thread's torch ops from now on, if EBBTIDE_CHECK is 1."""
    if os.environ.get("EBBTIDE_CHECK") and are_asked_for():
        from ebbtide.saver.check import ops, optimizers

        ops.enable()
        optimizers.watch()
        global _look_before_pause
        _look_before_pause = optimizers.warn_of_outside


def look_before_pause(tags: Sequence[str]) -> None:
    """Warns of optimizers that lie outside of these tags (none: every tag), if this process checks."""
    if _look_before_pause is not None:
        _look_before_pause(tags)
