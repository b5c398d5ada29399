"""The pools of regions, and the leases under which threads use them.

A lease is the use of pools by one thread for the length of one `with`. While a lease is open, the core refuses to pause
its tag. torch hands out free blocks that it cached in a pool without asking. So a pool must never be open while memory
of it is away:

- If nothing of the tag is away, any idle pool may be entered.
- If something is away, only a pool made since the last pause may be entered: its epoch is the tag's, so all its memory
  is resident. Next in line is an older pool with nothing in use, after its own memory has been brought back. Otherwise
  a fresh pool is made.
- Memory that was trimmed from a pool is brought back before the pool is entered. If that fails, so does the region.
- A dissolved pool is never leased again. torch frees its free segments at once, and the others when they become free.

A pool that a capture may have allocated from is marked for good: a replay uses blocks that torch calls free.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, NamedTuple

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.locks import locked, make_lock
from ebbtide.saver.pools.backends import PoolBackend
from ebbtide.saver.values.arguments import NO_OVERFLOW_CODE


class PoolKey(NamedTuple):
    """The properties that pools share when they share a slot of the core. `backup` and `overflow` are core codes."""

    tag: str
    backup: int
    device: int
    retain: bool = False
    overflow: int = NO_OVERFLOW_CODE
    flushes_first: bool = False  # on refusal torch frees its caches and asks again
    is_exportable: bool = False


@dataclass(eq=False)
class RegionPool:
    """A pool, and the facts that decide whether it may be entered."""

    handle: Any  # the pool itself, as the backend knows it
    device: int
    epoch: int
    number: int = 0
    trimmed: set[int] = field(default_factory=set)  # addresses of segments whose memory was released
    cached: set[int] = field(default_factory=set)  # addresses of segments that were free already when they left
    is_captured: bool = False  # a capture may have taken memory from it
    takes_all_threads: bool = False  # while it is leased
    is_dissolved: bool = False
    lease: "_core.HeldLease | None" = None  # the last one: as long as it is open, the pool is leased

    @property
    def is_leased(self) -> bool:
        """Whether a thread uses the pool. Closing the lease is therefore all it takes to make its pools idle."""
        return self.lease is not None and self.lease.is_open

    @property
    def is_idle(self) -> bool:
        """Whether a thread may lease it."""
        return not self.is_leased and not self.is_dissolved


def may_enter(pool_epoch: int, lease_epoch: int, is_away: bool) -> bool:
    """Whether a pool may be entered: nothing of the tag is away, or the pool is newer than the last pause."""
    return not is_away or pool_epoch == lease_epoch


class RegionPools:
    """The pools of each key, idle and leased. Thread-safe."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._slots: dict[PoolKey, int] = {}
        self._pools: dict[PoolKey, list[RegionPool]] = {}
        self._keys_of: dict[str, list[PoolKey]] = {}  # of `_pools`, by tag
        self.made = 0

    def slot(self, key: PoolKey) -> int:
        """The slot of the key. The first call binds it, which makes the tag known.

        Raises:
            StateError: all slots are taken.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _core.bind_slot(
                    key.tag, key.device, key.backup, key.retain, key.overflow, key.flushes_first, key.is_exportable
                )
            return slot

    @locked
    def policies(self, tag: str) -> list[PoolKey]:
        """The keys of this tag that were ever asked for, one for each policy and device."""
        return [key for key in self._slots if key.tag == tag]

    def take(
        self, backend: PoolBackend, key: PoolKey, lease: "_core.HeldLease", *, takes_all_threads: bool = False
    ) -> RegionPool:
        """An idle pool that may be entered under `lease` once its trimmed memory is back, or a fresh one. It stays
        leased until the lease closes.
        """
        pool = self._take_idle(key, lease) or self._take_retired(backend, key, lease) or self._make(backend, key, lease)
        with self._lock:
            pool.takes_all_threads = takes_all_threads
            pool.is_captured |= _core.capture_count() > 0
        return pool

    @locked
    def _take_idle(self, key: PoolKey, lease: "_core.HeldLease") -> RegionPool | None:
        # Always the oldest, so that its free blocks are reused.
        for pool in self._idle_of(key):
            if may_enter(pool.epoch, lease.epoch, lease.is_away):
                pool.lease = lease
                return pool
        return None

    def _take_retired(self, backend: PoolBackend, key: PoolKey, lease: "_core.HeldLease") -> RegionPool | None:
        with _core.Frame() as frame:
            with self._lock:
                retired, kept = self._idle_of(key), frame.withhold()
                for each in retired:
                    each.lease = kept  # no other thread takes them while their memory comes back
            pool = next((each for each in retired if _bring_back(backend, key.tag, each, lease)), None)
            if pool is not None:
                pool.lease = lease
            return pool

    def _make(self, backend: PoolBackend, key: PoolKey, lease: "_core.HeldLease") -> RegionPool:
        handle = backend.make(self.slot(key), key.device, key.tag)
        with self._lock:
            self.made += 1
            pool = RegionPool(handle, key.device, lease.epoch, self.made, lease=lease)
            self.add(key, pool)
            return pool

    def add(self, key: PoolKey, pool: RegionPool) -> None:
        """Registers a new pool of this key."""
        with self._lock:
            if key not in self._pools:
                self._pools[key] = []
                self._keys_of.setdefault(key.tag, []).append(key)
            self._pools[key].append(pool)

    @locked
    def _known(self, tags: Collection[str] | None) -> list[tuple[PoolKey, RegionPool]]:
        names = self._keys_of if tags is None else dict.fromkeys(tags)
        return [(key, pool) for name in names for key in self._keys_of.get(name, ()) for pool in self._pools[key]]

    def _idle_of(self, key: PoolKey) -> list[RegionPool]:
        return [pool for pool in self._pools.get(key, ()) if pool.is_idle]

    def idle(self, tags: Collection[str] | None = None) -> list[tuple[PoolKey, RegionPool]]:
        """The idle pools of these tags; None means all tags."""
        return [(key, pool) for key, pool in self._known(tags) if pool.is_idle]

    @locked
    def unleased(self, tags: Collection[str] | None = None) -> list[tuple[PoolKey, RegionPool]]:
        """The idle pools of these tags (None: all tags), and the dissolved ones that torch may still hold memory of."""
        names = self._keys_of if tags is None else dict.fromkeys(tags)
        return [
            (key, pool)
            for name in names
            for key in self._keys_of.get(name, ())
            for pool in self._pools[key]
            if not pool.is_leased
        ]

    def dissolved(self, tags: Collection[str] | None = None) -> list[tuple[PoolKey, RegionPool]]:
        """The dissolved ones of these, except those withheld right now."""
        return [(key, pool) for key, pool in self.unleased(tags) if pool.is_dissolved]

    def pools(self, tag: str) -> list[RegionPool]:
        """All pools of the tag that are not dissolved, leased ones too."""
        return [pool for _, pool in self._known([tag]) if not pool.is_dissolved]

    @locked
    def withhold(self, tags: Collection[str], frame: "_core.Frame") -> list[tuple[PoolKey, RegionPool]]:
        """Like `withheld`, until the frame is closed."""
        chosen = [(key, pool) for key, pool in self.idle(tags) if not pool.is_captured]
        kept = frame.withhold()
        for _, pool in chosen:
            pool.lease = kept
        return chosen

    def withheld(self, tags: Collection[str]) -> "Withheld":
        """For a `with`: the idle pools of these tags, except those that a capture has marked. No thread leases them
        meanwhile, nor afterwards those that were dissolved by then.
        """
        return Withheld(self, tags)

    def forget(self, gone: Sequence[tuple[PoolKey, RegionPool]]) -> None:
        """Drops dissolved pools of which no memory is left."""
        over = frozenset(pool for _, pool in gone)
        with self._lock:
            for key in {key for key, _ in gone}:
                self._pools[key] = list(filterfalse(over.__contains__, self._pools[key]))

    def begin_capture(self, frame: "_core.Frame", pool_id: Any = None) -> None:
        """Counts a capture until the frame is closed. Marks the pools that it may allocate from: the one with this
        id, and those that are open for all threads, now or later. The marks stay.
        """
        frame.begin_capture()
        with self._lock:
            for pool in [pool for pools in self._pools.values() for pool in pools]:
                is_named = pool_id is not None and getattr(pool.handle, "id", None) == pool_id
                pool.is_captured |= is_named or (pool.takes_all_threads and pool.is_leased)


class Withheld(_core.Scope):
    """The context manager that `RegionPools.withheld` returns."""

    def __init__(self, owner: RegionPools, tags: Collection[str]) -> None:
        self._registry, self._tags = owner, tags
        self._frame = _core.Frame()

    def _open(self) -> list[tuple[PoolKey, RegionPool]]:
        return self._registry.withhold(self._tags, self._frame)

    def _close(self) -> None:
        self._frame.close()


def _bring_back(backend: PoolBackend, tag: str, pool: RegionPool, lease: "_core.HeldLease") -> bool:
    """Makes a retired pool's memory resident if nothing in it is in use; returns whether it may be entered under
    `lease`.

    Without this, a program that allocates in a paused tag in every cycle would leave a pool behind each time.
    """
    try:
        (segments,) = backend.segments_of([pool.handle])
        if segments is None or not all(segment.is_free for segment in segments):
            return False
        if segments:
            _core.resume([tag], addresses=[segment.address for segment in segments])
    except (Error, KeyError, TypeError, ValueError):
        # There is too little memory, a capture is under way, or the snapshot is not understood. A fresh pool will do.
        return False
    pool.trimmed.clear()
    pool.epoch = lease.epoch
    return True


def holder_name() -> str:
    """The name of this thread in errors about leases."""
    return f"thread {threading.current_thread().name!r}"


registry = RegionPools()
