"""The hooks of `saver.on`: functions that are called around operations."""

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, get_args

from ebbtide import _core
from ebbtide.locks import make_lock
from ebbtide.saver.values.arguments import check_tag

Around = Literal["before_pause", "after_pause", "before_resume", "after_resume"]
REMAPPED = "remapped"
HookEvent = Around | Literal["remapped"]
AROUND: tuple[str, ...] = get_args(Around)
EVENTS: tuple[str, ...] = (*AROUND, REMAPPED)
EVERY_TAG = "*"
Call = tuple[Callable[..., Any], str]

_lock = make_lock()
_hooks: dict[tuple[str, str], dict[int, Callable[..., Any]]] = {}  # by event and tag, each by its number
_numbers = itertools.count()  # hooks run in this order


def on(event: HookEvent, tag: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Calls `function(tag)` around each pause, resume or swap that moves memory of `tag`, in the calling thread. After
    `resume(wait=False)`, the first `wait()` of the Pending runs "after_resume", unless the tag was paused again by
    then.

        remove = saver.on("after_resume", "weights", print)

    No hook runs for an operation that is refused at once: unknown tags, an open region, a capture under way.

    Hooks run in the order in which they were added. If a before-hook raises, the operation does not start and nothing
    moves. If an after-hook raises, the other hooks still run, the operation stands, and the caller gets the first
    exception.

    Each before-hook that ran is answered, even if the operation is refused or fails, by the after-hooks that match the
    tag's state: a pause that moved nothing runs "after_resume", a resume that moved nothing runs "after_pause". For a
    tag that was left midway ("partial"), the call that finishes it runs them. An exception of an after-hook is then a
    RuntimeWarning, since the caller gets the error of the operation.

    For those who have given physical memory to others by its address (NCCL, RDMA), "remapped" tells of memory that is
    new behind an address that it had: after a resume, the returning half of a swap, a promotion or a demotion, before
    the hooks above, `function(tag, ranges)` gets the list of (address, bytes). After a failure it tells of what has
    come back by then.

    Args:
        event: "before_pause", "after_pause", "before_resume", "after_resume" or "remapped".
        tag: a tag, which need not exist yet, or "*" for every tag.
        function: called with the tag, for "remapped" also with the ranges. It may use the tag, and ebbtide: nothing is
            held meanwhile. A pause or resume of the same tag runs its hooks again.

    Returns:
        A callable that removes the hook; calling it twice does nothing.

    Raises:
        TypeError, ValueError: malformed arguments.
    """
    if event not in EVENTS:
        raise ValueError(f"event must be one of {', '.join(EVENTS)}, not {event!r}")
    if not callable(function):
        raise TypeError(f"a hook is a callable that takes the tag, not {function!r}")
    key, number = (event, tag if tag == EVERY_TAG else check_tag(tag)), next(_numbers)
    with _lock:
        _hooks.setdefault(key, {})[number] = function

    def remove() -> None:
        with _lock:
            _hooks.get(key, {}).pop(number, None)
            if not _hooks.get(key, True):
                del _hooks[key]

    return remove


def wants(events: Collection[str]) -> bool:
    """Whether any hook is registered for one of these events."""
    return bool(_hooks) and any(event in events for event, _ in list(_hooks))


def calls(event: str, tags: Iterable[str]) -> list[Call]:
    """The calls of all hooks for this event of these tags, in order."""
    found: list[Call] = []
    with _lock:
        of_every_tag = _hooks.get((event, EVERY_TAG), {})
        for tag in tags:
            functions = of_every_tag | _hooks.get((event, tag), {})
            found += [(functions[number], tag) for number in sorted(functions)]
    return found


def run_all(left: list[Call], errors: list[Exception]) -> None:
    """Runs each call once and removes it from the list. Their exceptions are added to `errors`.

    After an interrupt, the remaining calls are still in the list.
    """
    while left:
        try:
            _core.call_next(left)
        except Exception as error:
            errors.append(error)
