"""Locks for a process that may fork.

A forked child has one thread. A lock that another thread held at the fork is never released there, and a wait for it
hangs. So every lock of this package is made here, and is free in a child, unless the forking thread holds it.

From Python 3.12 on, what an interrupt raises as a loop goes back to its beginning skips the `finally` and the `with`
around it, if the loop has a condition (https://github.com/python/cpython/issues/130279). So there is no such loop below
a `with` of this package: it is in a function of its own (`locked`), or the `with` is left before.
"""

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_made: "weakref.WeakSet[Any]" = weakref.WeakSet()


def make_lock() -> Any:
    """A threading.RLock, so that a signal handler that calls ebbtide does not deadlock with its own thread."""
    lock = threading.RLock()
    _made.add(lock)
    return lock


def locked(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a method of an object that has a `_lock`, which is held while it runs. Not for generators, whose body
    runs later."""

    @functools.wraps(method)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _T:
        with arguments[0]._lock:  # type: ignore[attr-defined]
            return method(*arguments, **options)

    return call


def make_signal() -> Any:
    """A lock that is taken, and that another thread releases once: `acquire(timeout=)` waits for it in one call into C,
    so that no interrupt comes in between. A forked child may not use it."""
    signal = threading.Lock()
    signal.acquire()
    return signal


# Held by the thread that writes a line of ours to a stream. A file of Python has a lock, which a forked child finds
# taken for ever if another thread was writing at the fork. So none is writing then, unless the reader is that slow.
writing = make_lock()
_WRITING_SECONDS = 1.0

# Whose `forget_parent` a forked child calls, in this order, as far as they are imported: last of all, since each may
# use the locks.
_WITH_STATE = (
    "ebbtide.saver.pools.backends",
    "ebbtide.saver.pools.bypass",
    "ebbtide.saver.telling.watch",
    "ebbtide.saver.operations.safe_points",
    "ebbtide.processes.member",
    "ebbtide.processes.handing",
    "ebbtide.processes.lent",
    "ebbtide.processes.borrowed",
    "ebbtide.processes.links",
)


def _release_writing() -> None:
    if writing._is_owned():  # not where the wait ran out, or was interrupted
        writing.release()


def _begin_child() -> None:
    for lock in list(_made):
        if not lock._is_owned():
            lock._at_fork_reinit()
    _release_writing()
    for name in _WITH_STATE:
        getattr(sys.modules.get(name), "forget_parent", bool)()


os.register_at_fork(
    before=functools.partial(writing.acquire, timeout=_WRITING_SECONDS),  # in C: no interrupt parts it
    after_in_parent=_release_writing,
    after_in_child=_begin_child,
)
