"""`saver.safe_point`: where a program does what other processes have asked of it (`ebbtide pause PID`)."""

import functools
import threading
import time
from typing import Any, NamedTuple

from ebbtide import _core, driver_choice
from ebbtide.errors import Error, OutOfMemoryError
from ebbtide.locks import make_lock
from ebbtide.processes import member, queue, requests
from ebbtide.saver.operations import pause_resume
from ebbtide.saver.operations.hooked_operation import run
from ebbtide.saver.operations.trim import trim
from ebbtide.saver.pools import captures
from ebbtide.saver.values.arguments import AS_ALLOCATED, check_flag, check_leaving
from ebbtide.saver.values.reports import Asked, Report, SafePoint
from ebbtide.stderr import say

_LOOK_SECONDS = 1.0  # another thread may bring back what is away


class _Away(NamedTuple):
    """What one request has paused."""

    paused_set: "_core.PausedSet"
    is_for_room: bool  # it comes back by itself, as soon as there is room
    since: int  # when it left, by the clock of the queue

    def tags(self) -> list[str]:
        """Of those, the ones of which something is away still."""
        names = self.paused_set.tags()
        return _core.preview("resume", names, True, paused_set=self.paused_set) if names else []


class _Now:
    is_doing = False  # a thread does what is asked


_now = _Now()
_lock = make_lock()  # one thread at a time does what is asked; the others wait, since memory is moving
_away: list[_Away] = []
_thread = threading.local()


def safe_point(wait: bool = False) -> SafePoint:
    """Does what other processes have asked of this one since the last call: the pauses, resumes and trims of
    `ebbtide pause PID` and its like, and pauses for another's resume (`configure(give_up=)`). Without a request it
    costs about a microsecond.

        for batch in batches:
            train(batch)
            saver.safe_point(wait=True)

    Call it where no other thread uses memory of the tags. A request that fails fails for the one who asked: nothing is
    raised here. During a capture, and inside of another safe point, nothing is done.

    Args:
        wait: return only when nothing is away that a request has paused. Meanwhile further requests are done. What was
            given up for room, and what nobody can ask back since this process has left the others, comes back here as
            soon as there is room, in turn. False: the program looks at `away`, and touches none of these tags.

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


def offer_safe_points() -> None:
    """Makes the end of each step of torch's optimizers, in all threads, a `safe_point(wait=True)`. A program that runs
    with EBBTIDE_SHARED=1 has this from its first region on.

        saver.configure(shared=True)
        saver.offer_safe_points()
    """
    _offer()


@functools.cache
def _offer() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            safe_point(wait=True)

    register_optimizer_step_post_hook(after_step)


member.after_joining_by_variable.append(offer_safe_points)


def forget_parent() -> None:
    """In a forked child: the memory is the parent's."""
    _away.clear()
    _now.is_doing = False


def _serve(wait: bool, done: list[Asked]) -> list[str]:
    """Returns the tags of which something is away."""
    while True:
        _do_all(done)
        away = _tags_away()
        if not (wait and away):
            return away
        if not _bring_back_own():
            member.wait_for_request(_LOOK_SECONDS)


def _tags_away() -> list[str]:
    with _lock:
        return _forget_what_is_back()


def _forget_what_is_back() -> list[str]:
    found = [(each, each.tags()) for each in _away]
    _away[:] = [each for each, tags in found if tags]
    return sorted({tag for _, tags in found for tag in tags})


def _do_all(done: list[Asked]) -> None:
    with _lock:
        _now.is_doing = True
        try:
            done.extend(map(_do, member.begin_requests()))
        finally:
            _now.is_doing = False


def _do(request: requests.Request) -> Asked:
    """Whatever happens, the one who asked gets an answer."""
    begin = time.perf_counter()
    tags, size, problem = list[str](), 0, "the program was interrupted"
    try:
        tags, size = _DOING[request.what](request)
        problem = ""
    except Exception as error:
        problem = str(error) or type(error).__name__
    finally:
        seconds = time.perf_counter() - begin
        if not request.is_for_room:
            member.answer(request, requests.Answer(tags, size, seconds, problem))
    return Asked(request.what, tuple(tags), request.asker, size, seconds, problem)


def _pause(request: requests.Request) -> tuple[list[str], int]:
    names = request.tags
    if request.is_for_room:
        names = [tag for tag in names if tag in member.gives_up()]
        if not names:
            return [], 0
    leaving = check_leaving((names,) if names else (), AS_ALLOCATED, "pause")
    kept = _Away(_core.PausedSet(), request.is_for_room, time.monotonic_ns())
    _away.append(kept)  # before: a pause that fails midway leaves some of it away
    report = pause_resume.pause_into(leaving, request.is_for_room, kept.paused_set)
    return kept.paused_set.tags(), report.bytes


def _resume(request: requests.Request) -> tuple[list[str], int]:
    if request.tags:
        report = pause_resume.resume(request.tags, timeout=request.patience_seconds)
        return sorted({row.tag for row in report.rows}), report.bytes
    tags, size = list[str](), 0
    for each in list(_away):
        tags += each.tags()
        size += _bring_back(each, request.patience_seconds)
    return tags, size


def _trim(request: requests.Request) -> tuple[list[str], int]:
    report = trim(request.tags) if request.tags else trim()
    return sorted({row.tag for row in report.rows}), report.bytes


_DOING = {requests.PAUSE: _pause, requests.RESUME: _resume, requests.TRIM: _trim}


def _bring_back(away: _Away, seconds: float) -> int:
    names = away.paused_set.tags()
    call = functools.partial(_core.resume, names, True, paused_set=away.paused_set)
    report = run("resume", call, None, names, missing_ok=True, paused_set=away.paused_set, seconds=seconds)
    return Report.from_core(report).bytes


def _bring_back_own() -> bool:
    """What nobody else brings back. Whether it has waited for that."""
    own = [each for each in _away if each.is_for_room or member.files() is None]
    for each in own:
        try:
            with queue.Place(each.since):
                _bring_back(each, _LOOK_SECONDS)
        except OutOfMemoryError:
            continue
        except Error as error:
            say(f"what was given up for another process can't come back yet: {error}")
            return False
    return bool(own)
