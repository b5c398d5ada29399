"""What pause, resume and swap have in common: the hooks around one call into the core."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ebbtide import _core
from ebbtide.saver import captures, hooks
from ebbtide.saver.known_tags import find_tags

Kind = Literal["pause", "resume"]
Move = tuple[Kind, list[str]]


def run_before(moves: list[Move], missing_ok: bool) -> list[Move]:
    """Runs the before-hooks of each (kind, tags); gives back the tags with something to move, for `run_after`."""
    wanted = tuple(f"{when}_{kind}" for kind, _ in moves for when in ("before", "after"))
    if not hooks.wants(wanted):
        return []
    concerned = _concerned_tags(moves, missing_ok)
    reached: list[Move] = []
    with settled(reached):
        for kind, tags in concerned:
            for tag in tags:
                reached.append((kind, [tag]))
                hooks.run_before(f"before_{kind}", [tag])
    return concerned


def run_after(concerned: list[Move]) -> None:
    """Runs the after-hooks; the first exception arrives when all have run."""
    hooks.run_after(*((f"after_{kind}", tags) for kind, tags in concerned))


@contextmanager
def settled(concerned: list[Move]) -> Iterator[None]:
    """Runs `settle` where the operation inside fails."""
    try:
        yield
    except BaseException:
        settle(concerned)
        raise


def settle(concerned: list[Move]) -> None:
    """After a failure: each tag whose before-hooks ran gets the after-hooks of the state that it is in now.

    A tag that was left midway gets none: the call that finishes it runs them. What a hook raises here is a warning,
    since the caller gets the error of the operation.
    """
    for kind, tags in concerned:
        for tag in tags:
            info = _core.query_tag(tag)
            if info is None or info.state == "partial" or not hooks.is_any(f"before_{kind}", tag):
                continue
            event = f"after_{_other(kind) if _has_something(kind, info) else kind}"
            try:
                hooks.run_after((event, [tag]))
            except Exception as error:
                warnings.warn(f"an {event} hook of '{tag}' failed: {error!r}", RuntimeWarning, stacklevel=2)


def _other(kind: Kind) -> Kind:
    return "resume" if kind == "pause" else "pause"


def _concerned_tags(moves: list[Move], missing_ok: bool) -> list[Move]:
    """For each move the tags with something to move; none at all where the core will refuse."""
    concerned: list[Move] = []
    for kind, names in moves:
        chosen = list(find_tags(names).values())
        is_unknown = len(chosen) < len(names) and not missing_ok
        is_leased = kind == "pause" and any(info.lease_count for info in chosen)
        if is_unknown or is_leased or captures.is_capturing():
            return []
        concerned.append((kind, [info.tag for info in chosen if _has_something(kind, info)]))
    return concerned


def _has_something(kind: Kind, info: "_core.TagInfo") -> bool:
    if kind == "pause":
        return info.resident_bytes > info.left_bytes  # what a pause left on the host is paused
    return info.stored_bytes + info.dropped_bytes + info.left_bytes > 0
