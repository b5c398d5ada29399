"""The hooks of "remapped": after a move, the ranges whose physical memory is new."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ebbtide import _core
from ebbtide.saver.state import hooks

_T = TypeVar("_T")
_Homes = dict[int, tuple[int, int]]  # by the sequence number of an allocation: bytes that are here, and on the host


def tell_after(tags: list[str], move: Callable[[], _T], errors: list[Exception], *, is_queued: bool = False) -> _T:
    """Calls `move`, which moves memory of these tags (none: all), then the hooks.

    Args:
        errors: gets the exceptions of hooks after it succeeded. After a failure they become warnings.
        is_queued: once it returns, all that was away is mapped, although its bytes may be on their way.
    """
    if not hooks.wants([hooks.REMAPPED]):
        return move()
    before = {sequence: home for homes in _homes(tags).values() for sequence, home in homes[0].items()}
    try:
        result = move()
    except BaseException:
        failed: list[Exception] = []
        hooks.run_all(_calls(tags, before), failed)
        for error in failed:
            warnings.warn(f"a hook of remapped failed: {error!r}", RuntimeWarning, stacklevel=2)
        raise
    hooks.run_all(_calls(tags, before, is_queued), errors)
    return result


def _homes(tags: list[str]) -> dict[str, tuple[_Homes, dict[int, tuple[int, int]]]]:
    """By tag: where its allocations are, and their ranges."""
    found: dict[str, tuple[_Homes, dict[int, tuple[int, int]]]] = {}
    for each in _core.allocations():
        if not each.is_trimmed and (not tags or each.tag in tags):
            homes, ranges = found.setdefault(each.tag, ({}, {}))
            homes[each.sequence] = (each.resident_bytes, each.host_bytes)
            ranges[each.sequence] = (each.address, each.size_bytes)
    return found


def _calls(tags: list[str], before: _Homes, is_queued: bool = False) -> list[hooks.Call]:
    calls: list[hooks.Call] = []
    for tag, (homes, ranges) in _homes(tags).items():
        whole = {each: (ranges[each][1], 0) for each in homes if is_queued and before.get(each, (1, 0))[0] == 0}
        now = homes | whole
        new = [ranges[each] for each in now if each in before and _is_new(before[each], now[each])]
        if new:
            calls += [(partial(_tell, function, new), tag) for function, _ in hooks.calls(hooks.REMAPPED, [tag])]
    return calls


def _is_new(before: tuple[int, int], now: tuple[int, int]) -> bool:
    return now[0] > before[0] or (now[0] > 0 and now[1] != before[1])


def _tell(function: Callable[..., object], ranges: list[tuple[int, int]], tag: str) -> None:
    function(tag, list(ranges))
