"""EBBTIDE_CHECK=1: whether a thread's ops are checked. The check itself needs torch, so it is imported only then."""

import os

from ebbtide import settings


def are_asked_for() -> bool:
    """Whether EBBTIDE_CHECK is 1. Raises ValueError where it is neither 0 nor 1."""
    return settings.read("check", os.environ) == "1"


def enable_if_asked() -> None:
    """Checks this thread's torch ops from now on, if EBBTIDE_CHECK is 1."""
    if os.environ.get("EBBTIDE_CHECK") and are_asked_for():
        from ebbtide.saver.check import ops

        ops.enable()
