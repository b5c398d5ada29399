"""Memory that torch has cached, in regions and outside, and retries when the device is full."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ebbtide import _core, driver_choice
from ebbtide.errors import OutOfMemoryError
from ebbtide.processes import queue
from ebbtide.saver.pools import bypass, captures, ordinary_memory
from ebbtide.saver.reclaim import retired

_T = TypeVar("_T")

_FIRST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.25
_FIRST_ROOM_SECONDS = 0.1

# Others that can make room for a claim that failed with this error, once the caches have gone; each says whether it
# tried.
makers_of_room: list[Callable[[OutOfMemoryError], bool]] = []


def empty() -> bool:
    """Frees torch's cached memory outside regions. Returns whether torch uses the GPUs that regions cover."""
    torch = driver_choice.torch_on_gpu()
    if torch is None or captures.is_capturing():
        return False
    bypass.renew()
    with ordinary_memory.OrdinaryMemory():  # while a pool is open, torch empties that one only
        torch.cuda.empty_cache()
    return True


def give_back() -> bool:
    """Frees torch's unused cached memory: outside regions and, unless the caller does not rely on what torch
    calls free (`skip_unused`), wholly free segments in the pools of all tags (from torch 2.9 on). Returns whether that
    may have made room.

    While any thread is in a region, torch frees none of its cached memory outside of them.
    """
    is_flushed = empty()
    if _core.get_setting("skip_unused") == b"0":
        return is_flushed
    in_use = [info.tag for info in _core.tags() if info.resident_bytes]
    return bool(retired.retire(in_use, only_with_free_segments=True)) or is_flushed


def claim_with_retries(
    claim: Callable[[], _T],
    seconds: float = 0.0,
    make_room: Callable[[], bool] = lambda: False,
    tags: Sequence[str] = (),
) -> _T:
    """Calls `claim`, and again until `seconds` have passed, in turn with other processes if this one has joined them.
    After the first failure, whenever the time since then has doubled, and before the last try, everything that is
    cached is given back, and `makers_of_room` are called: what another thread frees meanwhile may lie in a cache, and
    giving back costs that thread time.

    Args:
        make_room: makes the claim smaller, and says whether it did; called where one fails.
        tags: what others are told that the claim is for; none means all.

    Raises:
        OutOfMemoryError: from the last try.
    """
    with queue.Turn(list(tags)) as turn:
        try:
            return _claim_in_turn(claim, seconds, make_room, turn)
        except OutOfMemoryError as error:
            if holders := turn.describe_holders(error):
                error.args = (f"{error}. {holders}",)
            raise


def _claim_in_turn(claim: Callable[[], _T], seconds: float, make_room: Callable[[], bool], turn: queue.Turn) -> _T:
    begin = time.monotonic()
    wait = _FIRST_WAIT_SECONDS
    try:
        if seconds <= 0 or turn.may_try_first():
            return _claim_or_make_room(claim, make_room)
    except OutOfMemoryError as error:
        if seconds <= 0:
            raise
        turn.note_shortage(error)
    next_room = _FIRST_ROOM_SECONDS
    while True:
        passed = time.monotonic() - begin
        left = seconds - passed
        if left <= 0 or turn.may_try():
            try:
                if left > 0 and passed < next_room:
                    return claim()
                next_room = 2 * passed
                return _claim_or_make_room(claim, make_room)
            except OutOfMemoryError as error:
                if left <= 0:
                    error.args = (f"{error} (tried for {seconds:g} s)",)
                    raise
                turn.note_shortage(error)
        turn.nap(min(wait, max(left, 0)))
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _claim_or_make_room(claim: Callable[[], _T], make_room: Callable[[], bool]) -> _T:
    try:
        return claim()
    except OutOfMemoryError as error:
        if not any([make_room(), give_back(), *[make(error) for make in makers_of_room]]):
            raise
    return claim()
