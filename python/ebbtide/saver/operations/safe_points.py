"""`saver.safe_point`: where a program does what other processes have asked of it (`ebbtide pause PID`)."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from ebbtide import _core, driver_choice
from ebbtide.errors import Error, OutOfMemoryError
from ebbtide.locks import make_lock
from ebbtide.processes import member, queue, requests
from ebbtide.saver.operations import pause_resume
from ebbtide.saver.operations.hooked_operation import after_resumes
from ebbtide.saver.operations.trim import trim
from ebbtide.saver.pools import captures
from ebbtide.saver.state.known_tags import find_tags
from ebbtide.saver.values.arguments import AS_ALLOCATED, NO_BACKUP_CODE, check_flag, check_leaving
from ebbtide.saver.values.reports import Asked, SafePoint
from ebbtide.stderr import say

_LOOK_SECONDS = 0.5  # another thread may bring back what is away
_SILENT_SECONDS = 3.0


class _Away(NamedTuple):
    """What one request has paused."""

    paused_set: "_core.PausedSet"
    asker: str
    is_for_room: bool  # it comes back by itself, as soon as there is room
    since: int  # when it left, by the clock of the queue

    def tags(self) -> list[str]:
        """Of those, the ones of which something is away still."""
        names = self.paused_set.tags()
        return _core.preview("resume", names, True, paused_set=self.paused_set) if names else []


class _Moved:
    """By one request so far, also where it fails then."""

    def __init__(self) -> None:
        self.tags: dict[str, None] = {}
        self.bytes = 0

    def note(self, tags: Iterable[str], size_bytes: int) -> None:
        self.tags.update(dict.fromkeys(tags))
        self.bytes += size_bytes


class _Now:
    is_doing = False  # a thread does what is asked


_now = _Now()
_lock = make_lock()  # one thread at a time does what is asked; those that wait in a safe point go on afterwards
_away: list[_Away] = []
_thread = threading.local()


def safe_point(wait: bool = False) -> SafePoint:
    """Does what other processes have asked of this one since the last call: the pauses, resumes and trims of
    `ebbtide pause PID` and its like, and pauses for another's resume (`configure(give_up=)`). Without a request it
    costs a microsecond or two.

        saver.safe_point(wait=True)  # after each step

    Call it where no other thread uses memory of the tags. A request that fails fails for the one who asked: nothing is
    raised here. During a capture, and inside of another safe point, nothing is done. What a request pauses keeps its
    content, also in regions without a backup.

    Args:
        wait: return only when nothing is away that a request has paused. Meanwhile further requests are done, and after
            three seconds stderr says what is away. What was given up for room, and what nobody can ask back since this
            process has left the others, comes back here as soon as there is room, in turn. False: the program looks at
            `away`, and touches none of these tags.

    Returns:
        A SafePoint.

    Raises:
        TypeError: wait is no bool.
    """
    check_flag(wait, "wait")
    if driver_choice.is_off() or captures.is_capturing():
        return SafePoint()
    member.note_safe_point()
    # In this order, so that no thread passes by while another one begins, does or has done what is asked.
    if not (member.has_requests() or _now.is_doing or _away) or getattr(_thread, "is_serving", False):
        return SafePoint()
    begin, done = time.perf_counter(), list[Asked]()
    _thread.is_serving = True
    try:
        away = _serve(wait, done)
    finally:
        _thread.is_serving = False
    return SafePoint(tuple(done), tuple(away), time.perf_counter() - begin)


def offer_safe_points() -> Any:
    """Makes the end of each step of torch's optimizers, in all threads, a `safe_point(wait=True)`. A program that runs
    with EBBTIDE_SHARED=1 has this from its first region on.

        offered = saver.offer_safe_points()
        offered.remove()  # ends it

    Steps that torch.compile has compiled are none.

    Returns:
        torch's handle of a hook, with `remove()`.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            safe_point(wait=True)

    return register_optimizer_step_post_hook(after_step)


member.after_joining_by_variable.append(offer_safe_points)


def forget_parent() -> None:
    """In a forked child: the memory is the parent's."""
    _away.clear()
    _now.is_doing = False


def _serve(wait: bool, done: list[Asked]) -> list[str]:
    """Returns the tags of which something is away."""
    begin, has_said = time.monotonic(), False
    while True:
        if not _do_all(done, wait):
            return sorted({tag for each in list(_away) for tag in each.paused_set.tags()})
        away = _tags_away()
        if not (wait and away):
            return away
        if not has_said and time.monotonic() - begin > _SILENT_SECONDS:
            has_said = True
            _say_what_is_away(away)
        is_waiting = _bring_back_own()
        member.wait_for_request(_LOOK_SECONDS / 10 if is_waiting else _LOOK_SECONDS)


def _say_what_is_away(tags: list[str]) -> None:
    askers = ", ".join(dict.fromkeys(each.asker for each in list(_away)))
    what = f"the program waits in a safe point, since {', '.join(tags)} is away: paused for {askers}"
    if all(each.is_for_room for each in list(_away)):
        say(f"{what}, and back as soon as there is room")
    else:
        say(f"{what}. `ebbtide resume {os.getpid()}` brings it back")


def _tags_away() -> list[str]:
    with _lock:
        return _forget_what_is_back()


def _forget_what_is_back() -> list[str]:
    """Also at the end of every resume: what the program pauses itself afterwards is no request's."""
    if captures.is_capturing():  # the core does not tell then
        return sorted({tag for each in _away for tag in each.paused_set.tags()})
    found = [(each, each.tags()) for each in list(_away)]
    gone = [each for each, tags in found if not tags]
    _away[:] = [each for each in _away if each not in gone]
    return sorted({tag for _, tags in found for tag in tags})


after_resumes.append(lambda: _forget_what_is_back() if _away else None)


def _do_all(done: list[Asked], wait: bool) -> bool:
    """False, without `wait`, where another thread does it: that one may wait for this one."""
    if not _lock.acquire(blocking=wait):
        return False
    try:
        _now.is_doing = True
        done.extend(filter(_is_worth_telling, map(_do, member.begin_requests())))
    finally:
        _now.is_doing = False
        _lock.release()
    return True


def _is_worth_telling(asked: Asked) -> bool:
    return bool(asked.tags or asked.problem) or asked.what != requests.PAUSE


def _do(request: requests.Request) -> Asked:
    """Whatever happens, the one who asked gets an answer."""
    begin, moved, problem = time.perf_counter(), _Moved(), "the program was interrupted"
    try:
        _DOING[request.what](request, moved)
        problem = ""
    except Exception as error:
        problem = str(error) or type(error).__name__
    finally:
        seconds = time.perf_counter() - begin
        member.answer(request, requests.Answer([*moved.tags], moved.bytes, seconds, problem))
    return Asked(request.what, tuple(moved.tags), request.asker, moved.bytes, seconds, problem)


def _pause(request: requests.Request, moved: _Moved) -> None:
    if not request.wanted_bytes:
        if tags := request.tags or [*find_tags([])]:
            _pause_tags(request, tags, moved)
        return
    for tag in member.gives_up():
        if tag in request.tags and moved.bytes < request.wanted_bytes:
            with contextlib.suppress(Error):  # one that is in use, say
                _pause_tags(request, [tag], moved)


def _pause_tags(request: requests.Request, tags: list[str], moved: _Moved) -> None:
    leaving = check_leaving((_with_backups(tags),), AS_ALLOCATED, "pause")
    kept = _Away(_core.PausedSet(), request.asker, request.wanted_bytes > 0, time.monotonic_ns())
    _away.append(kept)  # before: a pause that fails midway leaves some of it away
    try:
        report = pause_resume.pause_into(leaving, bool(request.wanted_bytes) or not request.tags, kept.paused_set)
    except BaseException:
        _undo(kept, moved)
        raise
    moved.note(kept.paused_set.tags(), report.bytes)


def _undo(kept: _Away, moved: _Moved) -> None:
    """Of a pause that has failed. What stays away is told to the one who asked."""
    try:
        pause_resume.resume_from(kept.paused_set)
    except Exception as error:
        moved.note(kept.paused_set.tags(), 0)
        say(f"what a failed pause for {kept.asker} took away is not back yet: {error}")


def _with_backups(tags: list[str]) -> dict[str, Any]:
    """None of them is to lose its content, which the program may not expect."""
    bare = {info.tag for info in _core.allocations() if info.backup == NO_BACKUP_CODE}
    return {tag: "ram" if tag in bare else AS_ALLOCATED for tag in tags}


def _resume(request: requests.Request, moved: _Moved) -> None:
    if request.tags:
        report = pause_resume.resume(request.tags)
        moved.note((row.tag for row in report.rows), report.bytes)
        return
    for each in list(_away):
        tags = each.tags()
        moved.note(tags, pause_resume.resume_from(each.paused_set))


def _trim(request: requests.Request, moved: _Moved) -> None:
    report = trim(request.tags) if request.tags else trim()
    moved.note((row.tag for row in report.rows), report.bytes)


_DOING = {requests.PAUSE: _pause, requests.RESUME: _resume, requests.TRIM: _trim}


def _bring_back_own() -> bool:
    """What nobody else brings back, where there is room and nobody waits who came before. Whether some has to wait."""
    own = [each for each in list(_away) if each.is_for_room or member.files() is None]
    tried = [_has_come_back(each) for each in own]
    return not all(tried)


def _has_come_back(away: _Away) -> bool:
    for device, wanted_bytes in queue.away_bytes(away.tags()).items():
        if not queue.may_start(device, wanted_bytes, away.since):
            return False
    try:
        pause_resume.resume_from(away.paused_set)
    except Exception as error:
        if not isinstance(error, OutOfMemoryError) and not getattr(_thread, "has_complained", False):
            _thread.has_complained = True
            say(f"what was given up for {away.asker} can't come back yet: {error}")
        return False
    return True
