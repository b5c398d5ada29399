"""This process among the others (`saver.configure(shared=True)`, EBBTIDE_SHARED=1): what it tells them, and when.

A thread tells it each second, if it has changed, and when it is asked; operations and waits do so at once. Where the
folder can't be used, the process works alone, and says so.
"""

import atexit
import contextlib
import functools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide import _core, settings
from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock, make_signal
from ebbtide.processes import folder, requests
from ebbtide.processes.entries import Entry, TagHolding, Wait
from ebbtide.stderr import say

_SECONDS = 1.0
_MOST_HOLDINGS = 1000

_lock = make_lock()
after_joining_by_variable: list[Callable[[], object]] = []


class _Joined(NamedTuple):
    files: folder.Membership
    room: Any  # a signal: another process may have made some
    asked: Any  # a signal: there may be a request


_joined: _Joined | None = None
_is_wanted: bool | None = None  # None: as the variable says
_waits: dict[object, Wait] = {}
_told: Entry | None = None
_gives_up: list[str] = []
_safe_point_at = 0
_has_requests = False


def configure(is_wanted: bool) -> None:
    """Joins the others, or leaves them.

    Raises: StateError: in a forked child.
    """
    global _is_wanted
    _is_wanted = is_wanted
    (_join if is_wanted else leave)()


def is_shared() -> bool:
    """Whether this process has joined, or will at its first region."""
    return _joined is not None or (_is_wanted is None and _says_variable())


def _says_variable() -> bool:
    return settings.read_or_fallback("shared", os.environ) == "1"


def join_if_wanted() -> None:
    if is_shared():
        _join()
        for each in after_joining_by_variable if _says_variable() else ():
            each()


def join() -> None:
    """Joins the others, where this process has not. Where that can't be, a line says why."""
    if _joined is None:
        _join()


def _join() -> None:
    global _joined
    _core.allocations()  # refused in a forked child
    with _lock:
        if _joined is not None:
            return
        try:
            files = folder.Membership(folder.Folder(folder.path()))
        except StateError as error:
            say(f"other processes can't see this one, and it takes no turns with them: {error}")
            return
        joined = _Joined(files, make_signal(), make_signal())
        try:
            threading.Thread(target=_answer, args=(joined,), name="ebbtide-processes", daemon=True).start()
        except RuntimeError as error:
            files.leave()
            say(f"other processes can't see this one, and it takes no turns with them: {error}")
            return
        _joined = joined
    _leave_at_exit()
    tell()


@functools.cache
def _leave_at_exit() -> None:
    atexit.register(leave)


def leave() -> None:
    global _joined, _told
    with _lock:
        if _joined is None:
            return
        joined, _joined, _told = _joined, None, None
        joined.files.leave()


def forget_parent() -> None:
    """In a forked child: the entry is the parent's."""
    global _joined, _told, _has_requests
    if _joined is not None:
        _joined.files.close()
    _joined = _told = None
    _has_requests = False
    _waits.clear()


def files() -> folder.Membership | None:
    """None where this process has not joined."""
    joined = _joined
    return joined.files if joined is not None else None


def others() -> list[Entry]:
    """What the others told last; nothing where they can't be read."""
    try:
        return [] if _joined is None else _joined.files.folder.entries()
    except (OSError, AttributeError):  # too many open files; or this process leaves meanwhile
        return []


def others_now() -> list[Entry]:
    """The same, after all have told anew."""
    try:
        return [] if _joined is None else _joined.files.folder.fresh_entries()
    except (OSError, AttributeError):
        return []


def wake() -> None:
    """Wakes a call of this process that waits for room."""
    if (joined := _joined) is not None and joined.room.locked():
        joined.room.release()


def wait_for_room(seconds: float) -> None:
    """So long, or until another of ebbtide's processes may have made room."""
    joined = _joined
    if joined is None:
        time.sleep(seconds)
    else:
        joined.room.acquire(timeout=seconds)


def has_requests() -> bool:
    """Whether another may have asked this process for something. Cheap."""
    return _has_requests


def begin_requests() -> Iterator[requests.Request]:
    """Those to this process, the oldest first. Each is this thread's to do and to answer."""
    global _has_requests
    _has_requests = False  # before the look: one that comes now is seen by it, or sets this again
    if (joined := _joined) is not None:
        requests.answer_left(joined.files.folder, joined.files.name)
    while (joined := _joined) is not None and (
        request := requests.begin_next(joined.files.folder, joined.files.name)
    ) is not None:
        yield request


def answer(request: requests.Request, found: requests.Answer) -> None:
    """Not where this process has left since, and is another one to the others."""
    if (joined := _joined) is not None and request.name.startswith(f"{joined.files.name}."):
        requests.answer(joined.files.folder, request, found)


def wait_for_request(seconds: float) -> None:
    joined = _joined
    if joined is None:
        time.sleep(seconds)
    else:
        joined.asked.acquire(timeout=seconds)


def note_safe_point() -> None:
    global _safe_point_at
    _safe_point_at = time.monotonic_ns()


def give_up(tags: list[str]) -> None:
    """Tells the others that they may ask for these."""
    global _gives_up
    _gives_up = tags
    tell()


def gives_up() -> list[str]:
    return list(_gives_up)


def tell(is_asked: bool = False) -> None:
    """Publishes what this process holds and waits for, if that has changed or another asks, and wakes those who wait
    if it is less."""
    global _told
    if _joined is None:
        return
    with _lock:
        if _joined is None:
            return
        files = _joined.files
        with contextlib.suppress(Error, OSError):  # a full folder must not fail an operation
            now = _entry(files)
            if _told is not None and not is_asked and _says_the_same(_told, now):
                return
            files.folder.write(now)
            before, _told = _told, now
            if before is not None and _may_help_others(before, now):
                files.folder.send(folder.ROOM, _names_of_waiting(files))


def _entry(files: folder.Membership) -> Entry:
    waits = [replace(wait, is_alone=is_alone()) for wait in _waits.values()]
    name, now = program_name(), time.monotonic_ns()
    return Entry(files.name, files.pid, name, now, _holdings(), waits, gives_up(), _safe_point_at)


def _says_the_same(before: Entry, now: Entry) -> bool:
    has_new_kind = before.safe_point_at == 0 < now.safe_point_at
    return not has_new_kind and replace(before, told_at=now.told_at, safe_point_at=now.safe_point_at) == now


def _names_of_waiting(files: folder.Membership) -> list[str]:
    return [each.name for each in files.folder.entries() if each.waits]


def _may_help_others(before: Entry, now: Entry) -> bool:
    devices = {each.device for each in before.tags}
    has_less = any(now.held_bytes(device) < before.held_bytes(device) for device in devices)
    return has_less or any(wait not in now.waits for wait in before.waits)


def is_alone() -> bool:
    """Whether no thread of the program's can make room while one waits."""
    return sum(not thread.name.startswith("ebbtide-") for thread in threading.enumerate()) <= 1


def waits_here() -> list[Wait]:
    """Of all threads of this process."""
    return list(_waits.values())


def set_wait(key: object, wait: Wait) -> None:
    _waits[key] = wait
    tell()


def end_wait(key: object) -> None:
    """Can be called again."""
    if _waits.pop(key, None) is not None or (_told is not None and _told.waits):
        tell()


def program_name() -> str:
    """As a user would know it: the script, or the module."""
    name = Path(sys.argv[0]).name if getattr(sys, "argv", None) and sys.argv[0] else ""
    known = name if name not in ("", "-c", "-m", "__main__.py") else "python"
    return known.encode(errors="backslashreplace").decode()


@functools.cache
def uuid_of(device: int) -> str:
    return _core.query_device(device).uuid.hex()


def _holdings() -> list[TagHolding]:
    sums: dict[tuple[int, str], list[int]] = {}
    for each in _core.allocations():
        amounts = sums.setdefault((each.device, each.tag), [0, 0])
        amounts[0] += each.resident_bytes - each.host_bytes
        amounts[1] += each.stored_bytes
    held = [
        TagHolding(uuid_of(device), tag, *sums[device, tag]) for device, tag in sorted(sums) if any(sums[device, tag])
    ]
    if len(held) <= _MOST_HOLDINGS:
        return held
    held.sort(key=lambda each: -each.resident_bytes - each.stored_bytes)
    return held[:_MOST_HOLDINGS]


def _look_for_requests(me: _Joined) -> None:
    """Each second as well: a word may be lost."""
    global _has_requests
    with contextlib.suppress(OSError):
        if requests.are_there(me.files.folder, me.files.name):
            _has_requests = True
            if me.asked.locked():
                me.asked.release()


def _answer(me: _Joined) -> None:
    """The thread of this process."""
    poll = select.poll()
    poll.register(me.files.socket, select.POLLIN)
    tell()
    while True:
        words = set()
        try:
            if poll.poll(1000 * _SECONDS):
                while word := me.files.socket.recv(1):
                    words.add(word)
        except OSError:  # all are read, or the process has left
            pass
        if me is not _joined:
            return
        if folder.ROOM in words and me.room.locked():
            me.room.release()
        _look_for_requests(me)
        if me.files.is_there():
            tell(is_asked=folder.ASK in words)
        else:
            say(f"{me.files.folder.place} was removed: this process joins the others anew")
            leave()
            _join()
