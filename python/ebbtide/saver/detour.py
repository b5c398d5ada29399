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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ebbtide import _core, driver_choice, torch_names
from ebbtide.errors import Error, StateError
from ebbtide.saver import captures, frames, program, workspaces
from ebbtide.saver.snapshots import Segment, read_cuda_segments

_logger = logging.getLogger(__name__)

PoolId = tuple[int, int]
OpenPool = tuple[int, PoolId]  # device, id

DEFAULT_POOL: PoolId = (0, 0)

_lock = threading.RLock()
_open: list[OpenPool] = []
_former: set[PoolId] = set()
_is_guarded = False


@contextmanager
def around_pause(names: list[str]) -> Iterator[None]:
    """Around the core's call that pauses these tags (none: all). Afterwards torch's allocations go where the state of
    the program's tag says, whether the call failed or not. Nothing in a program that is not pauseable.

    Raises:
        StateError: torch is too old; another thread is in a region. Nothing moved.
    """
    own = program.own()
    if own is None or not _concerns(own.tag, names) or not _has_cuda() or captures.is_capturing():
        yield
        return
    global _is_guarded
    frames.enable_check_if_asked()
    with _lock:
        captures.install()
        _check_torch()
        _check_threads()
        guard = _open_pools(own.tag)
        _is_guarded = True
        try:
            workspaces.forget()  # those that were made since the pause began to look
            yield
        finally:
            _is_guarded = False
            _settle(own.tag, guard)


def follow(names: list[str]) -> None:
    """After a resume of these tags (none: all): torch has its own pool again if nothing of the program's tag is
    away."""
    own = program.own()
    if own is None or not _concerns(own.tag, names):
        return
    global _open
    with _lock:
        if _open and not _is_away(own.tag):
            over, _open = _open, []
            _close_pools(over)


def follow_later(names: list[str], core: "_core.Pending") -> None:
    """As `follow`, once this resume is over, whether somebody waits for it or not."""
    own = program.own()
    if own is None or not _concerns(own.tag, names) or not _open:
        return

    def wait_and_follow() -> None:
        with contextlib.suppress(Error):  # `Pending.wait` raises it
            core.wait()
        follow(names)

    threading.Thread(target=wait_and_follow, name="ebbtide-detour", daemon=True).start()


def renew() -> None:
    """Makes what torch caches in the open pool a cache that it can give back: allocations go to a fresh one."""
    own = program.own()
    global _open
    with _lock:
        if own is not None and _open and not _is_guarded:
            over = _open
            _open = _open_pools(own.tag)
            _close_pools(over)


def idle_segments() -> list[Segment]:
    """The segments of pools from which nobody is given blocks before the pause under way is over: torch's default
    pool, and those of former detours. None outside `around_pause`."""
    global _former
    if not _is_guarded:
        return []
    from ebbtide.saver.cuda_pools import take_snapshot

    try:
        by_pool: dict[PoolId, list[Any]] = {}
        for segment in take_snapshot():
            by_pool.setdefault(tuple(segment["segment_pool_id"]), []).append(segment)
        _former &= by_pool.keys()
        idle = _former | {DEFAULT_POOL} | {pool_id for _, pool_id in _open}
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

    from ebbtide.saver.cuda_pools import INNER_BEATS_ALL_FROM
    from ebbtide.support import torch_version

    if torch_version(torch.__version__) < INNER_BEATS_ALL_FROM:
        raise StateError(
            f"pausing a whole program needs torch 2.11 or newer, and this is {torch.__version__}: "
            "upgrade torch, or use regions"
        )


def _check_threads() -> None:
    others = frames.other_threads_in_regions()
    if others:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        raise StateError(
            f"thread {names.get(others[0], others[0])!r} is in a region, and while the program's own tag leaves, what "
            "it allocates there would lose its tag: leave the region first, and enter it again after the pause"
        )


def _is_away(tag: str) -> bool:
    info = _core.query_tag(tag)
    return info is not None and info.stored_bytes + info.dropped_bytes + info.left_bytes > 0


def _settle(tag: str, guard: list[OpenPool]) -> None:
    global _open
    before, _open = _open, [*_open, *guard]
    fresh = _open_pools(tag) if _is_away(tag) else []
    _open = fresh
    _close_pools([*before, *guard])


def _open_pools(tag: str) -> list[OpenPool]:
    """A new pool for all threads on each device on which the tag has memory; below this thread's own regions."""
    import torch

    opened: list[OpenPool] = []
    try:
        for device in sorted({info.device for info in _core.allocations(tag)}):
            pool_id = tuple(torch.cuda.graph_pool_handle())
            torch_names.find("_C._cuda_beginAllocateToPool")(device, pool_id)
            opened.append((device, pool_id))
        frames.this_thread().reenter()
    except BaseException:
        _close_pools(opened)
        raise
    return opened


def _close_pools(pools: list[OpenPool]) -> None:
    for device, pool_id in pools:
        torch_names.end_allocate()(device, pool_id)
        torch_names.find("_C._cuda_releasePool")(device, pool_id)
        _former.add(pool_id)


def _forget_parent() -> None:
    global _lock, _open, _is_guarded
    _lock = threading.RLock()
    _open, _is_guarded = [], False


os.register_at_fork(after_in_child=_forget_parent)
