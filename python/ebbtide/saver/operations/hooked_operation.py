"""The way of a pause, a resume or a swap from its caller to the core and back: `run`.

Down: torch's workspaces are freed, the hooks of `saver.on` run, torch's default pool is guarded, and torch is asked
which memory is dead and which is free. Then comes one call into the core, so that Ctrl-C arrives before or after it,
never in between. Up: torch allocates from its default pool again, hooks run, and returned memory is copied ahead of its
next pause.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

from ebbtide import _core
from ebbtide.errors import LENT, has_cause
from ebbtide.processes import handing, lent, member
from ebbtide.saver.check import enabling
from ebbtide.saver.copying import keeper
from ebbtide.saver.pools import bypass, captures, workspaces
from ebbtide.saver.reclaim import torch_cache
from ebbtide.saver.reclaim.look import Look, make_room
from ebbtide.saver.state import hooks, remapped
from ebbtide.saver.state.known_tags import has_memory_away
from ebbtide.saver.telling.watch import watched
from ebbtide.saver.values.arguments import PauseRequest
from ebbtide.saver.values.reports import Report

_T = TypeVar("_T")
Kind = Literal["pause", "resume"]
Action = tuple[Kind, str]  # with a tag

after_resumes: list[Callable[[], object]] = []
_EVENTS = {"pause": hooks.AROUND[:2], "resume": hooks.AROUND[2:], "swap": hooks.AROUND}


def run(
    operation: str,
    call: Callable[..., _T],
    leaving: PauseRequest | None = None,
    returning: list[str] | None = None,
    *,
    missing_ok: bool = False,
    paused_set: "_core.PausedSet | None" = None,
    seconds: float = 0.0,
    finish: "Callable[[_T, HookedOperation | None], Any] | None" = None,
) -> _T:
    """Does one call of the core with all that comes before and after it; returns its result.

    Args:
        call: takes `unused` and `unused_as_of`; called again where the device had too little room.
        leaving, returning: the tags that the call pauses and resumes (an empty list: all); None: nothing.
        paused_set: only these allocations return.
        seconds: how long to go on trying where the device has too little room.
        finish: called with the result and the hooked operation (None: there are no hooks) before the after-hooks run,
            instead of the steps after a resume.
    """
    names: list[str] = []
    shared: list[str] = []
    tags: dict[Kind, list[str]] = {}
    is_capturing = captures.is_capturing()
    if leaving is not None:
        names = tags["pause"] = leaving.names
        if not is_capturing:  # during one the core refuses, and they are in use
            workspaces.clear()
        shared = bypass.shared_tags(names)
    if returning is not None:
        tags["resume"] = returning
    is_lending = lent.is_listening()
    errors: list[Exception] = []  # of hooks after which all goes on
    move = partial(_move, operation, call, names, leaving, returning, seconds, finish, errors)
    if shared or is_capturing or hooks.wants(_EVENTS[operation]):
        hooked = HookedOperation(tags, missing_ok, paused_set)
        guards = (bypass.lock, bypass.Guard(shared)) if shared else (nullcontext(), nullcontext())
        with hooked, guards[0], guards[1]:
            result = _with_borrowers(names, finish is None, partial(move, hooked)) if is_lending else move(hooked)
    else:
        for each in tags.values():  # no other operation is busy with the tags then, so that torch's answers hold
            _core.wait_for_tags(each)
        result = _with_borrowers(names, finish is None, partial(move, None)) if is_lending else move(None)
    if finish is None and returning is not None:
        keeper.keep_if_wanted(returning)
    if returning is not None:
        for follow in after_resumes:
            follow()
        if is_lending:
            handing.release_unneeded()
    member.tell()
    if errors and finish is None:
        raise errors[0]
    for error in errors:  # the caller needs what it gets
        warnings.warn(f"a remapped hook failed: {error!r}", RuntimeWarning, stacklevel=2)
    return result


def _with_borrowers(names: list[str], waits: bool, move: Callable[[], _T]) -> _T:
    """Calls it. Then other processes get back what they use and is here."""
    try:
        result = move()
    except BaseException as error:
        lent.give_back(waits=False)
        if has_cause(error, LENT):
            lent.explain_refusal(names)
        raise
    if waits:
        lent.give_back(waits=True)
    return result


def _move(
    operation: str,
    call: Callable[..., _T],
    names: list[str],
    leaving: PauseRequest | None,
    returning: list[str] | None,
    seconds: float,
    finish: "Callable[[_T, HookedOperation | None], Any] | None",
    errors: list[Exception],
    hooked: "HookedOperation | None",
) -> _T:
    """The steps of `run` for which the tags must be at rest."""
    if leaving is not None:
        enabling.look_before_pause(names)
    look = Look([*names, *(returning or ())])
    look.release_dead()
    unused, as_of = look.unused(leaving, returning)
    claim = partial(call, unused=unused, unused_as_of=as_of, **(_asking(names) if leaving is not None else {}))
    # A `finish` shows the progress of what goes on in the background itself.
    with watched(operation, names, returning or ()) if finish is None else nullcontext():
        if returning is None:
            return claim()
        come_back = partial(torch_cache.claim_with_retries, claim, seconds, partial(make_room, returning), returning)
        result = remapped.tell_after(returning, come_back, errors, is_queued=finish is not None)
    if finish is None:
        bypass.close_if_resident(returning)
    else:
        finish(result, hooked)
        keeper.keep_if_wanted(returning)  # an interrupt in it loses the result, so the hooks are answered here
    return result


def run_alone(operation: str, names: list[str], missing_ok: bool, **options: Any) -> Report:
    """One call of the core that runs no hooks and needs nothing of torch: "prepare", "promote" or "demote"."""
    with watched(operation, names):
        asking = _asking(names) if operation == "demote" else {}
        move = partial(getattr(_core, operation), names, missing_ok, **options, **asking)
        errors: list[Exception] = []
        report = _with_borrowers(names, True, partial(remapped.tell_after, names, move, errors))
    if errors:
        raise errors[0]
    return Report.from_core(report)


def _asking(names: list[str]) -> dict[str, Callable[[], None]]:
    """The option of an operation that takes memory of these tags away: it asks other processes that use it."""
    return {"before_moving": partial(lent.make_way, names)} if lent.is_listening() else {}


class HookedOperation(_core.Scope):
    """Runs the before-hooks, then the block, then the after-hooks.

    It first asks the core which tags would move; where the core refuses them, no hook runs. Nothing is held while hooks
    run, so that they may use the tags: a claim would make them wait for themselves.

    Each before-hook that ran is answered once, however the block ends. If it succeeds, the after-hooks of its action
    run. If it fails, the after-hooks that match the tag's state run instead. A tag that was left midway gets none: the
    call that finishes it runs them.

    Args:
        tags: those of each kind of action; an empty list means all.
    """

    def __init__(
        self, tags: dict[Kind, list[str]], missing_ok: bool, paused_set: "_core.PausedSet | None" = None
    ) -> None:
        self._tags, self._missing_ok, self._paused_set = tags, missing_ok, paused_set
        self._announced: dict[Action, None] = {}
        self._unanswered: list[Action] | None = None
        self._queue: list[hooks.Call] | None = None
        self._is_handed_over = False
        self._errors: list[Exception] = []

    def _open(self) -> "HookedOperation":
        has_hooks = hooks.wants([f"{when}_{kind}" for when in ("before", "after") for kind in self._tags])
        concerned: list[Action] = [
            (kind, tag)
            for kind, tags in self._tags.items()
            for tag in _core.preview(kind, tags, self._missing_ok, paused_set=self._paused_set)
        ]
        for kind, tag in concerned if has_hooks else ():
            announce = (self._announced.__setitem__, ((kind, tag), None))
            for function, _ in hooks.calls(f"before_{kind}", [tag]):
                _core.call_together(announce, (function, (tag,)))
            _core.call_together(announce)
        return self

    @property
    def announced(self) -> list[Action]:
        """The actions whose before-hooks ran."""
        return list(self._announced)

    def hand_over(self) -> None:
        """From now on a `Pending` runs the after-hooks."""
        self._is_handed_over = True

    def _close(self) -> Exception | None:
        if not self._announced:
            return None
        if self._failure is not None:
            if self._unanswered is None:
                self._unanswered = list(self._announced)
            run_hooks_after_failure(self._unanswered)
        elif not self._is_handed_over:
            if self._queue is None:
                self._queue = calls_after(self._announced)
            hooks.run_all(self._queue, self._errors)
        return self._errors[0] if self._errors else None


def calls_after(actions: Iterable[Action]) -> list[hooks.Call]:
    """The calls of the after-hooks of actions that are done."""
    return [call for kind, tag in actions for call in hooks.calls(f"after_{kind}", [tag])]


def run_hooks_after_failure(unanswered: list[Action]) -> None:
    """Runs, for each tag whose before-hooks ran, the after-hooks that match its state now.

    A tag that was left midway gets none: the call that finishes it runs them. An exception of a hook becomes a warning,
    since the caller gets the error of the operation. Tags that are done are removed from the list, so that a second
    call goes on where an interrupt stopped the first.
    """
    while unanswered:
        kind, tag = unanswered[0]
        _core.wait_for_tags([tag])  # an interrupt may have left a resume in the background
        info = _core.query_tag(tag)
        is_refused = info is not None and is_left_to_do(kind, info)
        event = f"after_{_OTHER[kind] if is_refused else kind}"
        has_state = info is not None and info.state != "partial"
        queue = hooks.calls(event, [tag]) if has_state and hooks.calls(f"before_{kind}", [tag]) else []
        unanswered.pop(0)
        while queue:
            try:
                _core.call_next(queue)
            except Exception as error:
                warnings.warn(f"an {event} hook of '{tag}' failed: {error!r}", RuntimeWarning, stacklevel=2)


_OTHER: dict[Kind, Kind] = {"pause": "resume", "resume": "pause"}


def is_left_to_do(kind: Kind, info: "_core.TagInfo") -> bool:
    """Whether the tag has memory that a pause, or a resume, would move."""
    if kind == "pause":
        # Memory that a pause left on the host counts as paused. Memory that a failure left unmapped has yet to be
        # paused.
        is_detached = info.state == "partial" and info.detached_bytes > 0
        return info.resident_bytes > info.paused_host_bytes + info.kept_bytes or is_detached
    return has_memory_away(info)
