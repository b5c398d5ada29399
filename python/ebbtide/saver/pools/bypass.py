"""Pools that torch allocates from while tags of its default pool are away: that of a pauseable program, and tags that
threads gave to their own allocations outside regions.

torch hands out free blocks of its default pool without asking. While these are paused it must not. So a pool of our
own is open for all threads, on each device where the tags have memory.

- Such a pool is a bare id, like the pool of a capture. The driver hooks provide its memory, which therefore carries
  the tag of the program or of the thread. After the pool is closed and released, torch's cached blocks in it are freed
  like any other: at `empty_cache`, and when memory is short.
- A pause also takes memory that lies in the open pool. So one pool is opened before the pause, and from then on torch
  hands out no block that is about to leave. A second one, in which nothing is paused, replaces it after the pause.
- The pool that was opened last wins. Captures and regions that begin later have pools of their own. Regions that this
  thread entered earlier are entered again. Regions that other threads are in cannot be, so they refuse the pause.
- The free blocks of a pool that torch no longer allocates from count as unused. A graph's pool never does: a replay
  uses blocks that torch calls free.

Read in torch 2.11 and newer. In older torch the pool that was opened first may win. There, no pool is opened: torch's
cache is emptied, and a warning says once that nothing may be allocated until the resume.
"""

import contextlib
import logging
import threading
import warnings
from collections.abc import Collection

from ebbtide import _core, driver_choice
from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock
from ebbtide.saver.check import enabling
from ebbtide.saver.pools import captures, workspaces
from ebbtide.saver.state import program
from ebbtide.saver.state.known_tags import find_tags, has_memory_away
from ebbtide.saver.values.arguments import backup_code
from ebbtide.saver.values.segments import Segment, read_cuda_segments
from ebbtide.torch_support import torch_names
from ebbtide.torch_support.versions import torch_version

_logger = logging.getLogger(__name__)

PoolId = tuple[int, int]

DEFAULT_POOL: PoolId = (0, 0)
_RAM = backup_code("ram")

lock = make_lock()
_open: "list[_BypassPools]" = []
_tags_behind: set[str] = set()  # the tags for which pools are open
_closed: set[PoolId] = set()
_guarded: list[str] = []  # the tags of the pause that is under way, while a pool guards it
_has_warned = False


class _BypassPools:
    """A new pool for all threads, on each device where a tag has memory. They open in one step, as one frame."""

    def __init__(self) -> None:
        self._frame = _core.Frame()
        self.ids: list[PoolId] = []

    def fill(self, tags: Collection[str]) -> None:
        """Prepares the pools. May be called again after an interrupt."""
        import torch

        begin, release = (torch_names.find(f"_C._cuda_{name}") for name in ("beginAllocateToPool", "releasePool"))
        frame, ids = _core.Frame(), []
        for device in sorted({info.device for tag in tags for info in _core.allocations(tag)}):
            pool_id = tuple(torch.cuda.graph_pool_handle())
            ids.append(pool_id)
            frame.add_use(begin, (device, pool_id), (torch_names.end_allocate(), release))
        self._frame, self.ids = frame, ids

    def open(self) -> None:
        """Opens the pools beneath this thread's own regions. A second call does nothing."""
        if not self._frame.is_active:
            self._frame.activate()
        _core.reenter()

    @property
    def is_open(self) -> bool:
        return self._frame.is_active

    def close(self) -> None:
        """Closes the pools. A second call does nothing."""
        _closed.update(self.ids)
        self._frame.close()


def shared_tags(names: list[str]) -> list[str]:
    """Those of these tags (none: all) that memory of torch's default pool may have."""
    own = program.own()
    if own is None and not program.has_hooks():
        return []
    tags = [own.tag] if own is not None and _concerns(own.tag, names) else []
    return [*tags, *(tag for tag in _hooked_tags(names) if tag not in tags)]


def _hooked_tags(names: list[str]) -> list[str]:
    return [tag for tag, info in find_tags(names).items() if info.is_hooked] if program.has_hooks() else []


class Guard(_core.Scope):
    """Wraps the core's call that pauses these `shared_tags`; the caller holds `lock`.

    Afterwards torch allocates from where the state of the tags requires, whether the call failed or not.

    Raises:
        StateError: another thread is in a region. Nothing moved.
    """

    def __init__(self, shared: list[str]) -> None:
        self._shared = shared
        self._tags: list[str] = []
        self._guard: _BypassPools | None = None
        self._fresh: _BypassPools | None = None

    def _open(self) -> None:
        if not _has_cuda() or captures.is_capturing():
            return
        self._tags = _in_default_pool(self._shared)
        if not self._tags:
            return
        global _guarded
        enabling.enable_if_asked()
        captures.install()
        if not _can_redirect():
            _empty_cache_and_warn()
            return
        _check_threads()
        guard = _BypassPools()
        guard.fill(self._tags)
        self._guard = guard
        guard.open()
        _guarded = self._tags
        workspaces.clear()  # workspaces that were made since the pause began

    def _close(self) -> Exception | None:
        guard = self._guard
        if guard is None:
            return None
        global _guarded, _open
        _guarded = []
        try:
            _tags_behind.update(self._tags)
            if self._fresh is None and _is_any_away():
                fresh = _BypassPools()
                fresh.fill(_tags_behind)
                self._fresh = fresh
            if self._fresh is not None:
                self._fresh.open()
        except (Error, RuntimeError) as error:  # the guard stays open, so that torch hands out nothing that is away
            _open = [*(pools for pools in _open if pools is not guard), guard]
            return error
        for pools in (*_open, guard):
            if pools is not self._fresh:
                pools.close()
        _open = [] if self._fresh is None else [self._fresh]
        return None


def close_if_resident(names: list[str]) -> None:
    """After a resume of these tags (none: all): torch allocates from its own pool again, unless memory of a tag of that
    pool is still away.
    """
    if not _is_any_behind(names):
        return
    global _open
    with lock:
        if _open and not _is_any_away():
            for pools in _open:
                pools.close()
            _open = []
            _tags_behind.clear()


def close_when_over(names: list[str], core: "_core.Pending") -> None:
    """Calls `close_if_resident` once this resume is over, whether or not a `Pending.wait` waits for it."""
    if not _open or not _is_any_behind(names):
        return

    def wait_and_close() -> None:
        with contextlib.suppress(Error):  # `Pending.wait` raises it
            core.wait()
        close_if_resident(names)

    try:
        threading.Thread(target=wait_and_close, name="ebbtide-bypass", daemon=True).start()
    except RuntimeError:  # the system gives no thread; the resume goes on
        wait_and_close()


def renew() -> None:
    """Lets torch free its cached blocks in the open pool: a fresh pool takes its place."""
    global _open
    with lock:
        if _open and not _guarded:
            over, fresh = _open, _BypassPools()
            fresh.fill(_tags_behind)
            _open = [*over, fresh]
            fresh.open()
            for pools in over:
                pools.close()
            _open = [fresh]


def guarded_tags() -> dict[str, int]:
    """The tags of torch's default pool that a pause takes now, each with a backup code of its memory."""
    if not _guarded:
        return {}
    own = program.own()
    return {tag: own.backup if own is not None and tag == own.tag else _RAM for tag in _guarded}


def idle_segments() -> list[Segment]:
    """The segments of pools that torch does not allocate from until the pause ends: its default pool and closed bypass
    pools. Empty outside a `Guard`.
    """
    global _closed
    if not _guarded:
        return []
    from ebbtide.saver.pools.cuda_pools import snapshot_by_pool

    try:
        by_pool = snapshot_by_pool()
        _closed &= by_pool.keys()
        idle = _closed | {DEFAULT_POOL} | {pool_id for pools in _open for pool_id in pools.ids}
        return [one for pool_id in idle for one in read_cuda_segments(by_pool.get(pool_id, ()))]
    except Exception as error:  # the format of torch's snapshot is not stable
        _logger.debug("torch's snapshot is not understood, so all of it counts as used: %r", error)
        return []


def _in_default_pool(tags: list[str]) -> list[str]:
    """The program's own tag, and those of the others that a segment of torch's default pool has."""
    own = program.own()
    others = [tag for tag in tags if own is None or tag != own.tag]
    mine = [tag for tag in tags if tag not in others]
    if not others:
        return mine
    from ebbtide.saver.pools.cuda_pools import snapshot_by_pool

    try:
        segments = {one["address"] for one in snapshot_by_pool().get(DEFAULT_POOL, ())}
    except Exception as error:  # the format of torch's snapshot is not stable
        _logger.debug("torch's snapshot is not understood, so every tag counts as one of its default pool: %r", error)
        return tags
    return [*mine, *(tag for tag in others if any(info.address in segments for info in _core.allocations(tag)))]


def _is_any_behind(names: list[str]) -> bool:
    return bool(_tags_behind) and any(_concerns(tag, names) for tag in set(_tags_behind))


def _is_any_away() -> bool:
    return any(map(has_memory_away, find_tags(list(_tags_behind)).values())) if _tags_behind else False


def _concerns(tag: str, names: list[str]) -> bool:
    return not names or tag in names


def _has_cuda() -> bool:
    """Whether torch can have cached anything yet."""
    return driver_choice.torch_on_gpu() is not None


def _can_redirect() -> bool:
    import torch

    from ebbtide.saver.pools.cuda_pools import INNER_BEATS_ALL_FROM

    return torch_version(torch.__version__) >= INNER_BEATS_ALL_FROM


def _empty_cache_and_warn() -> None:
    import torch

    torch.cuda.empty_cache()
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"this is torch {torch.__version__}, and torch before 2.11 hands out free parts of memory that a pause "
            "took away: allocate nothing on the device between the pause of a whole program and its resume",
            RuntimeWarning,
            stacklevel=2,
        )


def _check_threads() -> None:
    others = _core.others_in_regions()
    if others:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        raise StateError(
            f"thread {names.get(others[0], others[0])!r} is in a region, and while the program's own tag leaves, its "
            "allocations there would lose their tag: leave the region first, and enter it again after the pause"
        )


def forget_parent() -> None:
    """In a forked child (`ebbtide.locks`)."""
    global _open, _guarded
    _open, _guarded = [], []
    _tags_behind.clear()
