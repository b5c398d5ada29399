"""Memory that torch has cached outside regions, and retries when the device is full."""

import time
from collections.abc import Callable
from typing import TypeVar

from ebbtide import driver_choice
from ebbtide.errors import OutOfMemoryError
from ebbtide.saver.pools import bypass, captures, ordinary_memory

_T = TypeVar("_T")

_FIRST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.25

# Who else can make room for a claim that failed with this error, once torch's cache is empty; each says whether it
# tried.
makers_of_room: list[Callable[[OutOfMemoryError], bool]] = []


def empty() -> bool:
    """Frees what torch has cached outside regions. Returns whether torch uses the GPUs that regions cover."""
    torch = driver_choice.torch_on_gpu()
    if torch is None or captures.is_capturing():
        return False
    bypass.renew()
    with ordinary_memory.OrdinaryMemory():  # while a pool is open, torch empties that one only
        torch.cuda.empty_cache()
    return True


def claim_with_retries(
    claim: Callable[[], _T], seconds: float = 0.0, make_room: Callable[[], bool] = lambda: False
) -> _T:
    """Calls `claim`, once more after emptying torch's cache and asking who else can make room, and then again until
    `seconds` have passed.

    Args:
        make_room: makes the claim smaller, and says whether it did; called once, where the first one fails.

    Raises:
        OutOfMemoryError: from the last try.
    """
    deadline = time.monotonic() + seconds
    wait = _FIRST_WAIT_SECONDS
    try:
        return claim()
    except OutOfMemoryError as error:
        tried = [make_room(), empty(), *[make(error) for make in makers_of_room]]
        if not any(tried) and seconds == 0:
            raise
    while True:
        try:
            return claim()
        except OutOfMemoryError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                if seconds > 0:
                    error.args = (f"{error} (tried for {seconds:g} s)",)
                raise
        time.sleep(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
