"""Who uses which pool, and for how long.

A lease is the use of pools by one thread for the length of one `with`. The core knows of it: while one is open, its
tag cannot be paused. torch serves
free blocks that it cached in a pool without asking anybody, so a pool must never be open while memory of it is away:

- nothing of the tag is away: any idle pool may be entered;
- something is away: only a pool that was made since the last pause (its epoch is the tag's), so that all of its
  memory is resident; else an older one in which nothing is in use, once its own memory is back; else a fresh one.
"""

import threading
from dataclasses import dataclass
from typing import Any

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.saver.pools import PoolBackend


@dataclass(eq=False)
class LentPool:
    """A pool and what decides whether it may be entered."""

    pool: Any
    device: int
    epoch: int
    number: int = 0


def may_enter(pool_epoch: int, lease_epoch: int, is_away: bool) -> bool:
    """The rule above."""
    return not is_away or pool_epoch == lease_epoch


class Shelf:
    """The idle pools of each (tag, backup, device). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._slots: dict[tuple[str, int, int], int] = {}
        self._idle: dict[tuple[str, int, int], list[LentPool]] = {}
        self.made = 0

    def slot(self, tag: str, backup: int, device: int) -> int:
        """The slot of the combination, bound at the first call: that makes the tag known.

        Raises:
            StateError: all slots are taken.
        """
        key = (tag, backup, device)
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _core.bind_slot(tag, device, backup)
            return slot

    def take(self, backend: PoolBackend, tag: str, backup: int, device: int, lease: "_core.Lease") -> LentPool:
        """An idle pool that may be entered under `lease`, or a fresh one."""
        with self._lock:
            idle = self._idle.setdefault((tag, backup, device), [])
            # The oldest: always the same ones, so that free blocks are found again.
            for lent in sorted(idle, key=lambda lent: lent.number):
                if may_enter(lent.epoch, lease.epoch, lease.is_away):
                    idle.remove(lent)
                    return lent
            retired = sorted(idle, key=lambda lent: lent.number)
            idle.clear()  # nobody else takes them while their memory comes back
        try:
            reused = next((lent for lent in retired if _bring_back(backend, tag, lent, lease)), None)
        finally:
            with self._lock:
                idle.extend(retired)
        with self._lock:
            if reused is not None:
                idle.remove(reused)
                return reused
            self.made += 1
            number = self.made
        return LentPool(backend.make(self.slot(tag, backup, device), device, tag), device, lease.epoch, number)

    def give_back(self, tag: str, backup: int, lent: LentPool) -> None:
        """Makes the pool idle again."""
        with self._lock:
            self._idle.setdefault((tag, backup, lent.device), []).append(lent)

    def renew_lock(self) -> None:
        """In a forked child: the thread that held the lock may not exist here."""
        self._lock = threading.RLock()


def _bring_back(backend: PoolBackend, tag: str, lent: LentPool, lease: "_core.Lease") -> bool:
    """Makes a retired pool's memory resident, if nothing in it is in use: then it may be entered under `lease`. Without
    this, a program that allocates in a paused tag in every cycle would leave a pool behind each time."""
    segments = backend.unused_segments(lent.pool)
    if segments is None:
        return False
    try:
        if segments:
            _core.resume([tag], False, segments)
    except Error:
        return False  # too little memory for all of them, or a capture: a fresh pool takes what it needs
    lent.epoch = lease.epoch
    return True


def holder_name() -> str:
    """How this thread is named in errors about leases."""
    return f"thread {threading.current_thread().name!r}"


shelf = Shelf()
