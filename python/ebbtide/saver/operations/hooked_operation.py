"""The hooks of `saver.on`, run around one call into the core: shared by pause, resume and swap."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

from ebbtide import _core
from ebbtide.saver.pools import captures
from ebbtide.saver.state import hooks

Kind = Literal["pause", "resume"]
Action = tuple[Kind, list[str]]

_EVENTS: dict[Kind, tuple[str, str]] = {
    "pause": ("before_pause", "after_pause"),
    "resume": ("before_resume", "after_resume"),
}


class WithoutHooks:
    """What stands in for a `HookedOperation` where no hook is registered. The call into the core asks all it needs."""

    announced: tuple[Action, ...] = ()

    def __enter__(self) -> "WithoutHooks":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def hand_over(self) -> None:
        """No after-hook is to run."""


_WITHOUT_HOOKS = WithoutHooks()


def hooked(
    actions: list[Action], missing_ok: bool, moved: "_core.Moved | None" = None, *, asks_first: bool = False
) -> "HookedOperation | WithoutHooks":
    """For a `with` around the call into the core that does these actions.

    When the block begins, no other operation is busy with the tags, so that what it asks torch about them is so.

    Args:
        asks_first: what the core refuses is refused before the block begins, with hooks or without.
    """
    asks_first = asks_first or captures.is_capturing()
    if asks_first or hooks.wants(event for kind, _ in actions for event in _EVENTS[kind]):
        return HookedOperation(actions, missing_ok, moved)
    for _, tags in actions:
        _core.wait_for_tags(tags)
    return _WITHOUT_HOOKS


class HookedOperation(_core.Scope):
    """Runs the before-hooks, then the block, then the after-hooks.

    First it asks the core which tags would move. That waits for what other operations do with the tags, and where the
    core refuses them, no hook runs. Nothing is held while hooks run, so that they may use the tags: a claim would make
    them wait for themselves.

    Each before-hook that ran is answered once, however the block ends. If it succeeds, the after-hooks of its action
    run. If it fails, the after-hooks that match the tag's state run instead. A tag that was left midway gets none: the
    call that finishes it runs them.
    """

    def __init__(self, actions: list[Action], missing_ok: bool, moved: "_core.Moved | None" = None) -> None:
        self._actions, self._missing_ok, self._moved = actions, missing_ok, moved
        self._announced: dict[tuple[Kind, str], None] = {}
        self._unanswered: list[Action] | None = None
        self._queue: list[tuple[Callable[[str], Any], str]] | None = None
        self._is_handed_over = False
        self._first: Exception | None = None

    def _open(self) -> "HookedOperation":
        concerned = [(kind, _core.preview(kind, tags, self._missing_ok, self._moved)) for kind, tags in self._actions]
        if hooks.wants(event for kind, _ in self._actions for event in _EVENTS[kind]):
            for kind, tags in concerned:
                for tag in tags:
                    reach = (self._announced.__setitem__, ((kind, tag), None))
                    for function, _ in hooks.calls((f"before_{kind}", [tag])):
                        _core.call_together(reach, (function, (tag,)))
                    _core.call_together(reach)
        return self

    @property
    def announced(self) -> tuple[Action, ...]:
        """The actions whose before-hooks ran, each with one tag."""
        return tuple((kind, [tag]) for kind, tag in self._announced)

    def hand_over(self) -> None:
        """From now on a `Pending` runs the after-hooks."""
        self._is_handed_over = True

    def _close(self) -> Exception | None:
        if not self._announced:
            return None
        if self._failure is not None:
            if self._unanswered is None:
                self._unanswered = list(self.announced)
            run_hooks_after_failure(self._unanswered)
            return None
        if self._is_handed_over:
            return None
        if self._queue is None:
            self._queue = hooks.calls(*((f"after_{kind}", tags) for kind, tags in self.announced))
        while self._queue:
            try:
                _core.call_next(self._queue)
            except Exception as error:
                self._first = self._first or error
        return self._first


def run_hooks_after_failure(concerned: list[Action]) -> None:
    """Runs, for each tag whose before-hooks ran, the after-hooks that match its state now.

    A tag that was left midway gets none: the call that finishes it runs them. An exception of a hook becomes a warning,
    since the caller gets the error of the operation. Tags that are done are removed from the list, so that a second
    call goes on where an interrupt stopped the first.
    """
    while concerned:
        kind, tags = concerned[0]
        while tags:
            tag = tags[0]
            _core.wait_for_tags([tag])  # an interrupt may have left a resume in the background
            info = _core.query_tag(tag)
            if info is None or info.state == "partial" or not hooks.is_any_registered(f"before_{kind}", tag):
                tags.pop(0)
                continue
            event = f"after_{_other(kind) if _has_something(kind, info) else kind}"
            queue = hooks.calls((event, [tag]))
            tags.pop(0)
            while queue:
                try:
                    _core.call_next(queue)
                except Exception as error:
                    warnings.warn(f"an {event} hook of '{tag}' failed: {error!r}", RuntimeWarning, stacklevel=2)
        concerned.pop(0)


def unfinished(concerned: list[Action]) -> list[Action]:
    """The tags with something left to do. Another call has finished the others, and run their hooks."""

    def is_left(kind: Kind, tag: str) -> bool:
        info = _core.query_tag(tag)
        return info is not None and _has_something(kind, info)

    return [(kind, [tag for tag in tags if is_left(kind, tag)]) for kind, tags in concerned]


def _other(kind: Kind) -> Kind:
    return "resume" if kind == "pause" else "pause"


def _has_something(kind: Kind, info: "_core.TagInfo") -> bool:
    if kind == "pause":
        # Memory that a pause left on the host counts as paused. What a failure left unmapped has yet to be paused.
        is_detached = info.state == "partial" and info.detached_bytes > 0
        return info.resident_bytes > info.left_bytes or is_detached
    return info.stored_bytes + info.dropped_bytes + info.detached_bytes + info.left_bytes > 0
