"""What regions need of torch's allocator: `cuda_pools` offers it on a GPU, `cpu_pools` on the simulated device."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ebbtide.saver.values.segments import Segment


class PoolBackend(Protocol):
    """Pools are opaque objects bound to a slot and a device. One is open in one place at a time, and none is ever let
    die.

    The uses of one thread begin and end nested as regions are; one that is closed by another thread ends there.
    """

    device_type: str
    """torch's name of the device whose tensors live in regions: "cuda" or "cpu"."""

    inner_beats_all: bool
    """Whether a pool that a thread enters wins over one that was entered before for all threads."""

    one_thread_only: bool
    """Whether a pool takes every thread's allocations in any case (torch before 2.8): two regions would mix."""

    flushes_first: bool
    """Whether a pool that is refused memory gives cached memory back and asks again at once, whatever it gave."""

    def devices(self) -> Sequence[int]:
        """The ordinals that a region covers."""

    def make(self, slot: int, device: int, tag: str) -> Any:
        """A new pool whose memory comes from `slot` on `device`; `tag` is for messages."""

    def segments(self, pool: Any) -> Sequence[Segment] | None:
        """What the pool is cut into; None where this torch does not tell. What it tells may have any shape: raises
        whatever reading it raises."""

    def segments_of(self, pools: Sequence[Any]) -> Sequence[Sequence[Segment] | None]:
        """`segments` of each of these pools, by one question."""

    def dissolve(self, pool: Any) -> bool:
        """From now on nobody may enter the pool, and `give_back` has what is free in it. False where this torch can't
        do that, or somebody else uses the pool too: then all is as it was."""

    def give_back(self, dissolved: Sequence[Any]) -> None:
        """Gives back what is free in these pools, which are dissolved; on a GPU, what torch caches outside regions may
        go with it. Not for use during a capture, where torch can't flush."""

    def uses(self, pool: Any, takes_all_threads: bool) -> "Sequence[PoolUse]":
        """How what this thread (or any thread) allocates on the pool's device comes from the pool.

        Raises:
            StateError: this torch can't do that for all threads.
        """

    def suspension(self) -> "Sequence[PoolUse]":
        """How this thread gets ordinary memory, as far as the backend can say so."""


class PoolUse(NamedTuple):
    """What begins a use of torch's allocator and what ends it: built-in functions, so that no interrupt comes between.

    `enter(*arguments)` begins it. Each of `leave` is called at the end, with the same arguments, or with what `enter`
    returned; the first that fails is the last. What `enter` returned lives as long as the use does. Any thread may end
    it.
    """

    enter: Callable[..., Any]
    arguments: tuple[Any, ...]
    leave: tuple[Callable[..., Any], ...]
    leaves_by_token: bool = False


_backend: PoolBackend | None = None
_is_forked_child = False


def existing_backend() -> PoolBackend | None:
    """The backend of this process, if one was made (`startup.backend` makes it); decides nothing."""
    return _backend


def set_backend(made: PoolBackend) -> None:
    """From now on regions use this backend."""
    global _backend
    _backend = made


def is_forked_child() -> bool:
    """Whether this process is a fork of one that used regions."""
    return _is_forked_child


def _note_fork() -> None:
    global _is_forked_child
    _is_forked_child = _is_forked_child or _backend is not None


os.register_at_fork(after_in_child=_note_fork)
