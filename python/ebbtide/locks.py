"""Locks for a process that may fork.

A forked child has one thread. A lock that another thread held at the fork is never released there, and whoever waits
for it hangs. So every lock of this package is made here, and is free in a child, unless the forking thread holds it.
"""

import os
import threading
import weakref
from typing import Any

_made: "weakref.WeakSet[Any]" = weakref.WeakSet()


def make_lock() -> Any:
    """A threading.RLock, so that a signal handler that calls ebbtide does not deadlock with its own thread."""
    lock = threading.RLock()
    _made.add(lock)
    return lock


def make_condition(lock: Any) -> threading.Condition:
    """A threading.Condition over a lock of `make_lock`. Take the lock by `with lock`: an interrupt as `with condition`
    begins would leave it taken. In a forked child nobody may wait for it."""
    return threading.Condition(lock)


def make_signal() -> Any:
    """A lock that is taken, and that another thread releases once: `acquire(timeout=)` waits for it in one call into C,
    so that no interrupt comes in between. A forked child may not use it."""
    signal = threading.Lock()
    signal.acquire()
    return signal


def _renew() -> None:
    for lock in list(_made):
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew)
