"""EBBTIDE_CHECK=1: whether the ops of a thread are checked. The checks themselves need torch to be imported."""

import os

from ebbtide import settings


def are_asked_for() -> bool:
    """Whether EBBTIDE_CHECK is 1. Raises ValueError where it is neither 0 nor 1."""
    return settings.read("check", os.environ) == "1"


def enable_if_asked() -> None:
    """EBBTIDE_CHECK=1: from now on this thread's torch ops are checked."""
    if os.environ.get("EBBTIDE_CHECK") and are_asked_for():
        from ebbtide.saver.check import ops

        ops.enable()
