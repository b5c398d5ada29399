"""Who uses which pool, and for how long.

A lease is the use of pools by one thread for the length of one `with`. The core knows of it: while one is open, its
tag cannot be paused. torch serves
free blocks that it cached in a pool without asking anybody, so a pool must never be open while memory of it is away:

- nothing of the tag is away: any idle pool may be entered;
- something is away: only a pool that was made since the last pause (its epoch is the tag's), so that all of its
  memory is resident; else an older one in which nothing is in use, once its own memory is back; else a fresh one;
- what was trimmed of a pool comes back before it is entered, or the region is not;
- a pool that was dissolved is never lent again: torch gives back what is free in it, the rest as it gets free.

A pool that a capture may have taken memory from is marked for ever: a replay uses blocks that torch calls free.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.saver.names import NO_OVERFLOW_CODE
from ebbtide.saver.pools import PoolBackend


class PoolKey(NamedTuple):
    """What pools have in common that share a slot of the core. `backup` and `overflow` are the core's codes."""

    tag: str
    backup: int
    device: int
    retain: bool = False
    overflow: int = NO_OVERFLOW_CODE
    flushes_first: bool = False  # torch gives its caches back when the slot refuses, and asks again


@dataclass(eq=False)
class LentPool:
    """A pool and what decides whether it may be entered."""

    pool: Any
    device: int
    epoch: int
    number: int = 0
    trimmed: set[int] = field(default_factory=set)  # addresses of segments whose memory was given up
    is_captured: bool = False  # a capture may have taken memory from it
    takes_all_threads: bool = False  # while it is lent
    is_dissolved: bool = False


def may_enter(pool_epoch: int, lease_epoch: int, is_away: bool) -> bool:
    """The rule above."""
    return not is_away or pool_epoch == lease_epoch


class Shelf:
    """The pools of each key, idle and lent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._slots: dict[PoolKey, int] = {}
        self._idle: dict[PoolKey, list[LentPool]] = {}
        self._keys_of: dict[str, list[PoolKey]] = {}  # of `_idle`, by tag
        self._by_id: dict[Any, LentPool] = {}  # those that have torch's id, and were lent or idle
        self._lent: set[LentPool] = set()
        self._dissolved: list[tuple[PoolKey, LentPool]] = []
        self._capture_count = 0
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
        self, backend: PoolBackend, key: PoolKey, lease: "_core.Lease", *, takes_all_threads: bool = False
    ) -> LentPool:
        """An idle pool that may be entered under `lease` once its trimmed memory is back, or a fresh one."""
        lent = self._take_idle(key, lease) or self._take_retired(backend, key, lease) or self._make(backend, key, lease)
        with self._lock:
            lent.takes_all_threads = takes_all_threads
            lent.is_captured |= self._capture_count > 0
            self._lent.add(lent)
            self._note_id(lent)
        return lent

    def _take_idle(self, key: PoolKey, lease: "_core.Lease") -> LentPool | None:
        with self._lock:
            idle = self._idle_of(key)
            # The oldest: always the same ones, so that free blocks are found again.
            for lent in sorted(idle, key=lambda lent: lent.number):
                if may_enter(lent.epoch, lease.epoch, lease.is_away):
                    idle.remove(lent)
                    return lent
            return None

    def _take_retired(self, backend: PoolBackend, key: PoolKey, lease: "_core.Lease") -> LentPool | None:
        with self._lock:
            idle = self._idle_of(key)
            retired = sorted(idle, key=lambda lent: lent.number)
            idle.clear()  # nobody else takes them while their memory comes back
        reused = None
        try:
            reused = next((lent for lent in retired if _bring_back(backend, key.tag, lent, lease)), None)
        finally:
            with self._lock:
                idle.extend(lent for lent in retired if lent is not reused)
        return reused

    def _make(self, backend: PoolBackend, key: PoolKey, lease: "_core.Lease") -> LentPool:
        pool = backend.make(self.slot(key), key.device, key.tag)
        with self._lock:
            self.made += 1
            return LentPool(pool, key.device, lease.epoch, self.made)

    def give_back(self, key: PoolKey, lent: LentPool) -> None:
        """Makes the pool idle again."""
        with self._lock:
            self._lent.discard(lent)
            self._idle_of(key).append(lent)
            self._note_id(lent)

    def _idle_of(self, key: PoolKey) -> list[LentPool]:
        idle = self._idle.get(key)
        if idle is None:
            idle = self._idle[key] = []
            self._keys_of.setdefault(key.tag, []).append(key)
        return idle

    def _note_id(self, lent: LentPool) -> None:
        pool_id = getattr(lent.pool, "id", None)
        if pool_id is not None:
            self._by_id[pool_id] = lent

    def idle(self, tags: Collection[str] | None = None) -> list[tuple[PoolKey, LentPool]]:
        """The idle pools of these tags; None: all."""
        with self._lock:
            names = self._keys_of if tags is None else dict.fromkeys(tags)
            keys = [key for name in names for key in self._keys_of.get(name, ())]
            return [(key, lent) for key in keys for lent in self._idle[key]]

    @contextmanager
    def withheld(self, tags: Sequence[str]) -> Iterator[list[tuple[PoolKey, LentPool]]]:
        """The idle pools of these tags that no capture has marked; nobody is lent one of them meanwhile, nor afterwards
        if it is dissolved by then."""
        with self._lock:
            chosen = [(key, lent) for key, lent in self.idle(tags) if not lent.is_captured]
            for key, lent in chosen:
                self._idle[key].remove(lent)
        try:
            yield chosen
        finally:
            with self._lock:
                for key, lent in chosen:
                    if lent.is_dissolved:
                        self._dissolved.append((key, lent))
                    else:
                        self._idle[key].append(lent)

    def dissolved(self) -> list[tuple[PoolKey, LentPool]]:
        """All dissolved pools that torch may still hold memory of."""
        with self._lock:
            return list(self._dissolved)

    def forget(self, gone: Sequence[LentPool]) -> None:
        """Of these dissolved pools nothing is left."""
        with self._lock:
            over = frozenset(gone)
            self._dissolved = [entry for entry in self._dissolved if entry[1] not in over]

    def begin_capture(self, pool_id: Any = None) -> None:
        """From now until `end_capture` a capture may take memory from the pool with this id, from pools that are open
        for all threads, and from those that are opened meanwhile."""
        with self._lock:
            self._capture_count += 1
            for lent in self._lent:
                lent.is_captured |= lent.takes_all_threads
            named = self._by_id.get(pool_id)
            if named is not None:
                named.is_captured = True

    def end_capture(self) -> None:
        """Undoes `begin_capture`; the marks stay."""
        with self._lock:
            self._capture_count -= 1

    def renew_lock(self) -> None:
        """In a forked child: the thread that held the lock may not exist here."""
        self._lock = threading.RLock()


def _bring_back(backend: PoolBackend, tag: str, lent: LentPool, lease: "_core.Lease") -> bool:
    """Makes a retired pool's memory resident, if nothing in it is in use: then it may be entered under `lease`. Without
    this, a program that allocates in a paused tag in every cycle would leave a pool behind each time."""
    try:
        segments = backend.segments(lent.pool)
        if segments is None or not all(segment.is_free for segment in segments):
            return False
        if segments:
            _core.resume([tag], False, [segment.address for segment in segments])
    except (Error, KeyError, TypeError, ValueError):
        # Too little memory for all of them, a capture, a snapshot that is not understood: a fresh pool takes what it
        # needs.
        return False
    lent.trimmed.clear()
    lent.epoch = lease.epoch
    return True


def restore_trimmed(tag: str, pools: Sequence[LentPool]) -> None:
    """Brings back what was trimmed of these pools of the tag, all of it or nothing.

    Raises:
        OutOfMemoryError: there is too little room.
    """
    wanted = set().union(*(lent.trimmed for lent in pools))
    if not wanted:
        return
    # torch may have given a segment back since, and its address may be another allocation's by now.
    trimmed = [info.address for info in _core.allocations(tag) if info.is_trimmed and info.address in wanted]
    if trimmed:
        from ebbtide.saver import torch_cache

        torch_cache.claim_patiently(lambda: _core.resume([tag], False, trimmed))
    for lent in pools:
        lent.trimmed.clear()


def holder_name() -> str:
    """How this thread is named in errors about leases."""
    return f"thread {threading.current_thread().name!r}"


shelf = Shelf()
