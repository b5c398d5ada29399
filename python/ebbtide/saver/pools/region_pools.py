"""Who uses which pool, and for how long.

A lease is the use of pools by one thread for the length of one `with`. The core knows of it: while one is open, its
tag cannot be paused. torch serves
free blocks that it cached in a pool without asking anybody, so a pool must never be open while memory of it is away:

- nothing of the tag is away: any idle pool may be entered;
- something is away: only a pool that was made since the last pause (its epoch is the tag's), so that all of its
  memory is resident; else an older one in which nothing is in use, once its own memory is back; else a fresh one;
- what was trimmed of a pool comes back before it is entered, or the region is not;
- a pool that was dissolved is never leased again: torch gives back what is free in it, the rest as it gets free.

A pool that a capture may have taken memory from is marked for ever: a replay uses blocks that torch calls free.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.locks import make_lock
from ebbtide.saver.pools.backends import PoolBackend
from ebbtide.saver.values.arguments import NO_OVERFLOW_CODE


class PoolKey(NamedTuple):
    """What pools have in common that share a slot of the core. `backup` and `overflow` are the core's codes."""

    tag: str
    backup: int
    device: int
    retain: bool = False
    overflow: int = NO_OVERFLOW_CODE
    flushes_first: bool = False  # torch gives its caches back when the slot refuses, and asks again


@dataclass(eq=False)
class RegionPool:
    """A pool and what decides whether it may be entered."""

    handle: Any  # the pool itself, as the backend knows it
    device: int
    epoch: int
    number: int = 0
    trimmed: set[int] = field(default_factory=set)  # addresses of segments whose memory was given up
    is_captured: bool = False  # a capture may have taken memory from it
    takes_all_threads: bool = False  # while it is leased
    is_dissolved: bool = False
    lease: "_core.HeldLease | None" = None  # the last one: as long as it is open, the pool is leased

    @property
    def is_leased(self) -> bool:
        """Whether somebody uses it. Derived, so that the end of a lease is also what makes its pools idle."""
        return self.lease is not None and self.lease.is_open


def may_enter(pool_epoch: int, lease_epoch: int, is_away: bool) -> bool:
    """The rule above."""
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
        """The slot of the key, bound at the first call: that makes the tag known.

        Raises:
            StateError: all slots are taken.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _core.bind_slot(
                    key.tag, key.device, key.backup, key.retain, key.overflow, key.flushes_first
                )
            return slot

    def take(
        self, backend: PoolBackend, key: PoolKey, lease: "_core.HeldLease", *, takes_all_threads: bool = False
    ) -> RegionPool:
        """An idle pool that may be entered under `lease` once its trimmed memory is back, or a fresh one. It is leased
        as long as the lease is open."""
        pool = self._take_idle(key, lease) or self._take_retired(backend, key, lease) or self._make(backend, key, lease)
        with self._lock:
            pool.takes_all_threads = takes_all_threads
            pool.is_captured |= _core.capture_count() > 0
        return pool

    def _take_idle(self, key: PoolKey, lease: "_core.HeldLease") -> RegionPool | None:
        with self._lock:
            # The oldest: always the same ones, so that free blocks are found again.
            for pool in self._idle_of(key):
                if may_enter(pool.epoch, lease.epoch, lease.is_away):
                    pool.lease = lease
                    return pool
            return None

    def _take_retired(self, backend: PoolBackend, key: PoolKey, lease: "_core.HeldLease") -> RegionPool | None:
        with _core.Holding() as holding:
            with self._lock:
                retired, kept = self._idle_of(key), holding.withhold()
                for pool in retired:
                    pool.lease = kept  # nobody else takes them while their memory comes back
            for pool in retired:
                if _bring_back(backend, key.tag, pool, lease):
                    pool.lease = lease
                    return pool
        return None

    def _make(self, backend: PoolBackend, key: PoolKey, lease: "_core.HeldLease") -> RegionPool:
        handle = backend.make(self.slot(key), key.device, key.tag)
        with self._lock:
            self.made += 1
            pool = RegionPool(handle, key.device, lease.epoch, self.made, lease=lease)
            self.add(key, pool)
            return pool

    def add(self, key: PoolKey, pool: RegionPool) -> None:
        """A new pool of this key."""
        with self._lock:
            if key not in self._pools:
                self._pools[key] = []
                self._keys_of.setdefault(key.tag, []).append(key)
            self._pools[key].append(pool)

    def _keys(self, tags: Collection[str] | None) -> list[PoolKey]:
        names = self._keys_of if tags is None else dict.fromkeys(tags)
        return [key for name in names for key in self._keys_of.get(name, ())]

    def _idle_of(self, key: PoolKey) -> list[RegionPool]:
        idle = (pool for pool in self._pools.get(key, ()) if not pool.is_leased and not pool.is_dissolved)
        return sorted(idle, key=lambda pool: pool.number)

    def idle(self, tags: Collection[str] | None = None) -> list[tuple[PoolKey, RegionPool]]:
        """The idle pools of these tags; None: all."""
        with self._lock:
            return [(key, pool) for key in self._keys(tags) for pool in self._idle_of(key)]

    def withheld(self, tags: Sequence[str]) -> "Withheld":
        """For a `with`: the idle pools of these tags that no capture has marked; nobody leases one of them meanwhile,
        nor afterwards if it is dissolved by then."""
        return Withheld(self, tags)

    def withhold(self, tags: Sequence[str], holding: "_core.Holding") -> list[tuple[PoolKey, RegionPool]]:
        """`withheld`, until the holding is closed."""
        with self._lock:
            chosen = [(key, pool) for key, pool in self.idle(tags) if not pool.is_captured]
            kept = holding.withhold()
            for _, pool in chosen:
                pool.lease = kept
            return chosen

    def dissolved(self, tags: Collection[str] | None = None) -> list[tuple[PoolKey, RegionPool]]:
        """The dissolved pools of these tags (None: of all) that torch may still hold memory of, and that nobody holds
        back any more."""
        with self._lock:
            found = [(key, pool) for key in self._keys(tags) for pool in self._pools[key]]
            return [(key, pool) for key, pool in found if pool.is_dissolved and not pool.is_leased]

    def forget(self, gone: Sequence[tuple[PoolKey, RegionPool]]) -> None:
        """Of these dissolved pools nothing is left."""
        over = frozenset(pool for _, pool in gone)
        with self._lock:
            for key in {key for key, _ in gone}:
                self._pools[key] = [pool for pool in self._pools[key] if pool not in over]

    def begin_capture(self, holding: "_core.Holding", pool_id: Any = None) -> None:
        """Until the holding is closed, a capture may take memory from the pool with this id, from pools that are open
        for all threads, and from those that are opened meanwhile. The marks stay."""
        holding.begin_capture()
        with self._lock:
            for pool in [pool for pools in self._pools.values() for pool in pools]:
                is_named = pool_id is not None and getattr(pool.handle, "id", None) == pool_id
                pool.is_captured |= is_named or (pool.takes_all_threads and pool.is_leased)


class Withheld(_core.Scope):
    """What `RegionPools.withheld` gives."""

    def __init__(self, owner: RegionPools, tags: Sequence[str]) -> None:
        self._registry, self._tags = owner, tags
        self._holding = _core.Holding()

    def _open(self) -> list[tuple[PoolKey, RegionPool]]:
        return self._registry.withhold(self._tags, self._holding)

    def _close(self) -> None:
        self._holding.close()


def _bring_back(backend: PoolBackend, tag: str, pool: RegionPool, lease: "_core.HeldLease") -> bool:
    """Makes a retired pool's memory resident, if nothing in it is in use: then it may be entered under `lease`. Without
    this, a program that allocates in a paused tag in every cycle would leave a pool behind each time."""
    try:
        segments = backend.segments(pool.handle)
        if segments is None or not all(segment.is_free for segment in segments):
            return False
        if segments:
            _core.resume([tag], False, [segment.address for segment in segments])
    except (Error, KeyError, TypeError, ValueError):
        # Too little memory for all of them, a capture, a snapshot that is not understood: a fresh pool takes what it
        # needs.
        return False
    pool.trimmed.clear()
    pool.epoch = lease.epoch
    return True


def holder_name() -> str:
    """How this thread is named in errors about leases."""
    return f"thread {threading.current_thread().name!r}"


registry = RegionPools()
