"""Where torch's allocations go while the tag of a pauseable program is away.

What holds here (read in torch 2.11 and newer):
- torch hands out the free blocks of its default pool without asking anybody. While they are away it must not, so a
  pool of its own is open for all threads, on each device on which the tag has memory.
- Such a pool is a bare id, as a capture's is. Its memory comes from the driver's hooks, and so has the program's tag;
  it is made after the pause, and so is resident. Once it is closed and released, what torch caches of it goes the way
  of its other caches: at empty_cache, and where memory is short.
- A pause takes what lies in the pool that is open, too. So one is opened before it, from when on nobody is given a
  block that is about to leave, and another one after it, in which nothing is away.
- The pool that was opened last wins. Captures and regions that begin later have pools of their own. Regions of this
  thread that began earlier are entered again; those of other threads can't be, and stand against the pause.
- The free blocks of a pool that nobody is given blocks of may be called unused. A graph's pool is none of these: a
  replay uses what torch calls free.
"""

import contextlib
import logging
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ebbtide import _core, driver_choice
from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock
from ebbtide.saver.check import enabling
from ebbtide.saver.pools import captures, workspaces
from ebbtide.saver.state import program
from ebbtide.saver.values.segments import Segment, read_cuda_segments
from ebbtide.torch_support import torch_names
from ebbtide.torch_support.versions import torch_version

_logger = logging.getLogger(__name__)

PoolId = tuple[int, int]

DEFAULT_POOL: PoolId = (0, 0)

_lock = make_lock()
_open: "list[_BypassPools]" = []
_closed: set[PoolId] = set()
_is_guarded = False


class _BypassPools:
    """A new pool for all threads on each device on which a tag has memory. One frame, so that they open in one step."""

    def __init__(self) -> None:
        self._frame = _core.Frame()
        self.ids: list[PoolId] = []

    def fill(self, tag: str) -> None:
        """Prepares them; again, where that was cut short."""
        import torch

        begin, release = (torch_names.find(f"_C._cuda_{name}") for name in ("beginAllocateToPool", "releasePool"))
        frame, ids = _core.Frame(), []
        for device in sorted({info.device for info in _core.allocations(tag)}):
            pool_id = tuple(torch.cuda.graph_pool_handle())
            ids.append(pool_id)
            frame.add_use(begin, (device, pool_id), (torch_names.end_allocate(), release))
        self._frame, self.ids = frame, ids

    def open(self) -> None:
        """Opens them, below this thread's own regions. Twice does nothing."""
        if not self._frame.is_active:
            self._frame.activate()
        _core.reenter()

    @property
    def is_open(self) -> bool:
        return self._frame.is_active

    def close(self) -> None:
        """Closes them. Twice does nothing."""
        _closed.update(self.ids)
        self._frame.close()


def lock_for(names: list[str]) -> AbstractContextManager[Any]:
    """What a call that pauses these tags (none: all) holds: nothing in a program that is not pauseable."""
    own = program.own()
    return nullcontext() if own is None or not _concerns(own.tag, names) else _lock


class during_pause(_core.Scope):  # noqa: N801 - a verb, as it is used
    """Around the core's call that pauses these tags (none: all), under `lock_for`. Afterwards torch's allocations go
    where the state of the program's tag says, whether the call failed or not. Nothing in a program that is not
    pauseable.

    Raises:
        StateError: torch is too old; another thread is in a region. Nothing moved.
    """

    def __init__(self, names: list[str]) -> None:
        own = program.own()
        self._tag = own.tag if own is not None and _concerns(own.tag, names) else None
        self._guard: _BypassPools | None = None
        self._fresh: _BypassPools | None = None

    def _open(self) -> None:
        if self._tag is None or not _has_cuda() or captures.is_capturing():
            return
        global _is_guarded
        enabling.enable_if_asked()
        captures.install()
        _check_torch()
        _check_threads()
        guard = _BypassPools()
        guard.fill(self._tag)
        self._guard = guard
        guard.open()
        _is_guarded = True
        workspaces.clear()  # those that were made since the pause began to look

    def _close(self) -> Exception | None:
        guard = self._guard
        if guard is None or self._tag is None:
            return None
        global _is_guarded, _open
        _is_guarded = False
        try:
            if self._fresh is None and _is_away(self._tag):
                fresh = _BypassPools()
                fresh.fill(self._tag)
                self._fresh = fresh
            if self._fresh is not None:
                self._fresh.open()
        except (Error, RuntimeError) as error:  # then the guard stays: nobody is given what is away
            _open = [*(pools for pools in _open if pools is not guard), guard]
            return error
        for pools in (*_open, guard):
            if pools is not self._fresh:
                pools.close()
        _open = [] if self._fresh is None else [self._fresh]
        return None


def close_if_resident(names: list[str]) -> None:
    """After a resume of these tags (none: all): torch has its own pool again if nothing of the program's tag is
    away."""
    own = program.own()
    if own is None or not _concerns(own.tag, names):
        return
    global _open
    with _lock:
        if _open and not _is_away(own.tag):
            for pools in _open:
                pools.close()
            _open = []


def close_when_over(names: list[str], core: "_core.Pending") -> None:
    """As `close_if_resident`, once this resume is over, whether somebody waits for it or not."""
    own = program.own()
    if own is None or not _concerns(own.tag, names) or not _open:
        return

    def wait_and_close() -> None:
        with contextlib.suppress(Error):  # `Pending.wait` raises it
            core.wait()
        close_if_resident(names)

    threading.Thread(target=wait_and_close, name="ebbtide-bypass", daemon=True).start()


def renew() -> None:
    """Makes what torch caches in the open pool a cache that it can give back: allocations go to a fresh one."""
    own = program.own()
    global _open
    with _lock:
        if own is not None and _open and not _is_guarded:
            over, fresh = _open, _BypassPools()
            fresh.fill(own.tag)
            _open = [*over, fresh]
            fresh.open()
            for pools in over:
                pools.close()
            _open = [fresh]


def idle_segments() -> list[Segment]:
    """The segments of pools from which nobody is given blocks before the pause under way is over: torch's default
    pool, and those of bypass pools that are closed. None outside `during_pause`."""
    global _closed
    if not _is_guarded:
        return []
    from ebbtide.saver.pools.cuda_pools import take_snapshot

    try:
        by_pool: dict[PoolId, list[Any]] = {}
        for segment in take_snapshot():
            by_pool.setdefault(tuple(segment["segment_pool_id"]), []).append(segment)
        _closed &= by_pool.keys()
        idle = _closed | {DEFAULT_POOL} | {pool_id for pools in _open for pool_id in pools.ids}
        return [one for pool_id in idle for one in read_cuda_segments(by_pool.get(pool_id, ()))]
    except Exception as error:  # what torch tells of itself has no promised shape
        _logger.debug("torch's snapshot is not understood, so all of it counts as used: %r", error)
        return []


def _concerns(tag: str, names: list[str]) -> bool:
    return not names or tag in names


def _has_cuda() -> bool:
    """Whether torch may have cached anything yet."""
    return driver_choice.torch_on_gpu() is not None


def _check_torch() -> None:
    import torch

    from ebbtide.saver.pools.cuda_pools import INNER_BEATS_ALL_FROM

    if torch_version(torch.__version__) < INNER_BEATS_ALL_FROM:
        raise StateError(
            f"pausing a whole program needs torch 2.11 or newer, and this is {torch.__version__}: "
            "upgrade torch, or use regions"
        )


def _check_threads() -> None:
    others = _core.others_in_regions()
    if others:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        raise StateError(
            f"thread {names.get(others[0], others[0])!r} is in a region, and while the program's own tag leaves, what "
            "it allocates there would lose its tag: leave the region first, and enter it again after the pause"
        )


def _is_away(tag: str) -> bool:
    info = _core.query_tag(tag)
    return info is not None and info.stored_bytes + info.dropped_bytes + info.left_bytes > 0


def _forget_parent() -> None:
    global _open, _is_guarded
    _open, _is_guarded = [], False


os.register_at_fork(after_in_child=_forget_parent)
