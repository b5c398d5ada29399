"""The hooks of `saver.on`: functions that are called around operations."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ebbtide import _core
from ebbtide.locks import make_lock
from ebbtide.saver.values.arguments import check_tag

HookEvent = Literal["before_pause", "after_pause", "before_resume", "after_resume"]
EVENTS: tuple[str, ...] = get_args(HookEvent)
EVERY_TAG = "*"


@dataclass(frozen=True, eq=False)
class _Hook:
    event: str
    tag: str
    function: Callable[[str], Any]
    number: int  # hooks run in this order


_lock = make_lock()
_hooks: list[_Hook] = []
_by_tag: dict[tuple[str, str], list[_Hook]] = {}  # the same hooks by event and tag
_numbers = itertools.count()


def on(event: HookEvent, tag: str, function: Callable[[str], Any]) -> Callable[[], None]:
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

    Args:
        event: "before_pause", "after_pause", "before_resume" or "after_resume".
        tag: a tag, which need not exist yet, or "*" for every tag.
        function: called with the tag. It may use the tag, and ebbtide: nothing is held meanwhile. A pause or resume of
            the same tag runs its hooks again.

    Returns:
        A callable that removes the hook; calling it twice does nothing.

    Raises:
        TypeError, ValueError: malformed arguments.
    """
    if event not in EVENTS:
        raise ValueError(f"event must be one of {', '.join(EVENTS)}, not {event!r}")
    if not callable(function):
        raise TypeError(f"a hook is a callable that takes the tag, not {function!r}")
    hook = _Hook(event, tag if tag == EVERY_TAG else check_tag(tag), function, next(_numbers))
    with _lock:
        _hooks.append(hook)
        _by_tag.setdefault((event, hook.tag), []).append(hook)

    def remove() -> None:
        with _lock:
            if hook in _hooks:
                _hooks.remove(hook)
                _by_tag[event, hook.tag].remove(hook)
                if not _by_tag[event, hook.tag]:
                    del _by_tag[event, hook.tag]

    return remove


def wants(events: Iterable[str]) -> bool:
    """Whether any hook is registered for one of these events."""
    if not _hooks:  # the usual case
        return False
    events = set(events)
    with _lock:
        return any(hook.event in events for hook in _hooks)


def _calls(event: str, tags: Iterable[str]) -> list[tuple[_Hook, str]]:
    calls: list[tuple[_Hook, str]] = []
    with _lock:
        of_every_tag = _by_tag.get((event, EVERY_TAG), [])
        for tag in tags:
            hooks = [*of_every_tag, *_by_tag.get((event, tag), [])]
            calls += [(hook, tag) for hook in sorted(hooks, key=lambda hook: hook.number)]
    return calls


def is_any_registered(event: str, tag: str) -> bool:
    """Whether any hook is registered for this event of this tag."""
    return bool(_calls(event, [tag]))


def calls(*moved: tuple[str, Iterable[str]]) -> list[tuple[Callable[[str], Any], str]]:
    """The calls of all hooks for each (event, tags), in order."""
    return [(hook.function, tag) for event, tags in moved for hook, tag in _calls(event, tags)]


def run_all(left: list[tuple[Callable[[str], Any], str]]) -> None:
    """Runs each call once and removes it from the list. The first exception is raised after all have run.

    After an interrupt, the remaining calls are still in the list.
    """
    first: BaseException | None = None
    while left:
        try:
            _core.call_next(left)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
