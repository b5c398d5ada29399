"""What LMS cannot move, and why: for its report, and for errors when memory is short."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ebbtide.sizes import format_size

STATES, WEIGHTS, COMPILED = "optimizer states", "weights", "saved tensors of compiled models"
SHARED = "something else refers to their memory: a checkpoint that is still held, a view, or a graph"
NOT_OWN = "another library owns their memory, NumPy may refer to it, or torch.load made it on the simulated device"
NO_ROOM = "they found no room"
WHOLE = "a model that is compiled as a whole holds them until its forward ends: compile its blocks instead"
_PAGE = "docs/lms.md#what-cannot-leave"

_found: dict[str, weakref.WeakKeyDictionary[Any, Counter[str]]] = {
    kind: weakref.WeakKeyDictionary() for kind in (STATES, WEIGHTS, COMPILED)
}


def note(extension: Any, kind: str, owner: Any, sizes: Counter[str]) -> None:
    """Of an optimizer or a module: bytes by reason, 0 where that is unknown. Replaces what was noted of it before."""
    if dict(_found[kind].get(owner, ())) == dict(sizes):  # counters take 0 for nothing
        return
    if sizes:
        _found[kind][owner] = sizes
    else:
        del _found[kind][owner]
    extension.note_outside(describe())


def has(owner: Any) -> bool:
    """Whether something was noted of a module."""
    return owner in _found[WEIGHTS]


def forget(extension: Any) -> None:
    """At the end of LMS."""
    for found in _found.values():
        found.clear()
    extension.note_outside("")


def rows() -> list[tuple[str, int, str]]:
    """Kind, bytes and reason."""
    return [
        (kind, size, reason)
        for kind, found in _found.items()
        if kind != COMPILED or len(found) == 1  # several: blocks of what is no module itself
        for reason, size in _total(found.values()).most_common()
    ]


def describe() -> str:
    """One sentence for an error; "" where nothing lies outside."""
    parts = [f"{_describe(kind, size)} can't leave ({reason})" for kind, size, reason in rows()]
    return f"{'; '.join(parts)}: see {_PAGE}" if parts else ""


def _describe(kind: str, size: int) -> str:
    return f"{format_size(size)} of {kind}" if size else kind


def _total(counters: Iterable[Counter[str]]) -> Counter[str]:
    """With those that are 0, which a sum leaves out."""
    total: Counter[str] = Counter()
    for each in counters:
        total.update(each)
    return total
