"""The interface that regions need of torch's allocator, and the backend of this process.

`cuda_pools` implements it on a GPU, `cpu_pools` on the simulated device.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ebbtide.saver.values.segments import Segment
from ebbtide.saver.values.survivors import UsedBlock


class PoolBackend(Protocol):
    """Pools are opaque objects bound to a slot and a device. A pool is open in one place at a time and never dies.

    The uses of one thread begin and end nested, as regions do. A use that another thread closes ends there.
    """

    device_type: str
    """torch's name for the device whose tensors live in regions: "cuda" or "cpu"."""

    inner_beats_all: bool
    """Whether a pool that a thread enters wins over one that was opened earlier for all threads."""

    one_thread_only: bool
    """Whether a pool takes every thread's allocations in any case (torch before 2.8), so that two regions would mix."""

    flushes_first: bool
    """Whether a pool that is refused memory frees cached memory and asks again at once, even if it freed nothing."""

    def devices(self) -> Sequence[int]:
        """The ordinals that a region covers."""

    def make(self, slot: int, device: int, tag: str) -> Any:
        """A new pool whose memory comes from `slot` on `device`; `tag` is for messages."""

    def segments_of(self, pools: Sequence[Any]) -> Sequence[Sequence[Segment] | None]:
        """The segments of each of these pools; None where this torch cannot list them.

        The format of torch's answer is not stable: this raises any error of reading it.
        """

    def used_blocks(self, pools: Sequence[Any]) -> Sequence[UsedBlock]:
        """The blocks of at least these pools that are in use, with where they were made as far as torch knows it."""

    def dissolve(self, pool: Any) -> bool:
        """From now on nothing may enter the pool, and `give_back` frees its free segments.

        Returns False, and changes nothing, where this torch can't do that or something else uses the pool.
        """

    def give_back(self, dissolved: Sequence[Any]) -> None:
        """Frees the free segments of these dissolved pools. On a GPU, memory that torch caches outside regions may go
        too.

        Not for use during a capture, where torch can't flush.
        """

    def uses(self, pool: Any, takes_all_threads: bool) -> "Sequence[PoolUse]":
        """The uses that let this thread (or every thread) allocate from the pool on its device.

        Raises:
            StateError: this torch can't do that for all threads.
        """

    def suspension(self) -> "Sequence[PoolUse]":
        """The uses that give this thread ordinary memory, as far as the backend can."""

    def separate(self) -> "Separation":
        """Makes pools of ordinary memory for this thread, which die after their last use."""


class PoolUse(NamedTuple):
    """The calls that begin and end a use of torch's allocator: built-in functions, so that no interrupt comes between.

    `enter(*arguments)` begins it. Each of `leave` is called at the end, with the same arguments, or with `enter`'s
    result; the first that fails is the last. The result lives as long as the use does. Any thread may end
    it.
    """

    enter: Callable[..., Any]
    arguments: tuple[Any, ...]
    leave: tuple[Callable[..., Any], ...]
    leaves_by_token: bool = False


class Separation(NamedTuple):
    """Ordinary memory of which nothing is from torch's cache.

    The uses may begin and end several times. After the calls of `ends`, built-in functions with their arguments, torch
    frees its free segments at the next flush.
    """

    uses: Sequence[PoolUse]
    ends: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]


_backend: PoolBackend | None = None
_is_forked_child = False


def existing_backend() -> PoolBackend | None:
    """The backend of this process, or None while `startup.backend` has made none. Decides nothing."""
    return _backend


def set_backend(made: PoolBackend) -> None:
    """From now on regions use this backend."""
    global _backend
    _backend = made


def is_forked_child() -> bool:
    """Whether this process is a fork of one that used regions."""
    return _is_forked_child


def forget_parent() -> None:
    """In a forked child (`ebbtide.locks`)."""
    global _is_forked_child
    _is_forked_child = _is_forked_child or _backend is not None
