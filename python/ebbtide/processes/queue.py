"""The queue for each device: calls that found too little room wait in the order of their arrival.

Each process decides by itself, from what the others tell: of those that could start now, the one that came first is to
start. One that could not start anyway keeps no other from room.
"""

import os
import time
from collections.abc import Callable, Iterable

from ebbtide import _core
from ebbtide.errors import OutOfMemoryError, StateError
from ebbtide.processes import member, requests
from ebbtide.processes.entries import Entry, Wait
from ebbtide.sizes import format_size
from ebbtide.stderr import say

_SILENT_SECONDS = 3.0
_LONGEST_NAP_SECONDS = 0.1  # programs that are not ebbtide's wake nobody
_CHECK_SECONDS = 1.0
_PATIENCE_SECONDS = 1.0  # with one that could start and does not: it is stopped, or its limits are lower than the room


jumps: list[Callable[[list[str]], bool]] = []  # whether a call for these tags has room that is nobody else's


def startable_before(since: int, waits: Iterable[Wait], device: str, free_bytes: int) -> list[Wait]:
    """Those that came earlier and could start now."""
    return [wait for wait in waits if wait.device == device and wait.since < since and wait.wanted_bytes <= free_bytes]


def may_start(device: int, wanted_bytes: int, since: int) -> bool:
    """Whether one that came then has room, and nobody waits for the device who came before, able to start or not: that
    one may have asked several to make room."""
    info = _core.query_device(device)
    earlier = [wait for entry in member.others() for wait in entry.waits if wait.device == info.uuid.hex()]
    return wanted_bytes <= info.free_bytes and not any(wait.since < since for wait in earlier)


def can_never_start(mine: Wait, others: list[Entry], free_bytes: int, movable_bytes: int) -> bool:
    """Whether all that could make room wait, in the end for one another. Processes whose other threads may do so, and
    those that came later, which find this out themselves, count as free to go on.

    Args:
        movable_bytes: what may become free without them: of programs that are not ebbtide's, of this one's other
            threads.
    """
    reachable = free_bytes + movable_bytes
    blocked = {}
    for entry in others:
        held = entry.held_bytes(mine.device)
        waits = [wait for wait in entry.waits if wait.device == mine.device]
        if waits and all(wait.is_alone and wait.since < mine.since for wait in waits):
            blocked[entry.name] = (max(wait.wanted_bytes for wait in waits), held)
        else:
            reachable += held
    while reachable < mine.wanted_bytes:
        freed = [name for name, (wanted, _) in blocked.items() if wanted <= reachable]
        if not freed:
            return True
        reachable += sum(blocked.pop(name)[1] for name in freed)
    return False


def describe_holders(entries: Iterable[Entry], device: str) -> str:
    """Who holds the device, the largest first: "train.py 4711 holds 61.0 GiB: tags kv_cache, weights; waits for
    nothing"."""
    sentences = []
    for entry in sorted(entries, key=lambda entry: -entry.held_bytes(device)):
        held = entry.held_bytes(device)
        wanted = sum(wait.wanted_bytes for wait in entry.waits if wait.device == device)
        if held or wanted:
            tags = ", ".join(each.tag for each in entry.tags if each.device == device and each.resident_bytes)
            named = f": tags {tags}" if tags else ""
            waits = format_size(wanted) if wanted else "nothing"
            sentences.append(f"{entry.program} {entry.pid} holds {format_size(held)}{named}; waits for {waits}")
    return ". ".join(sentences)


class Turn(_core.Scope):
    """The place in the queue of one call, which ends with the block. Where this process has not joined others, it only
    naps."""

    def __init__(self, tags: list[str]) -> None:
        self._tags, self._begin, self._has_said = tags, time.monotonic(), False
        self._wait: Wait | None = None
        self._error = OutOfMemoryError()
        self._device = -1  # the ordinal
        self._checked = 0.0
        self._startable: dict[int, float] = {}  # by `since`: when an earlier one was first seen to be startable
        self._requests: dict[str, requests.Request] = {}  # for room, by the entry that is asked

    def _open(self) -> "Turn":
        return self

    def _close(self) -> None:
        member.end_wait(self)
        files = member.files()
        for request in self._requests.values():
            if files is not None:
                requests.withdraw(files.folder, request)

    def may_try_first(self) -> bool:
        """Whether the call may try at once: nobody could start now that waits for a device of it. If not, it stands in
        the queue."""
        if any(jump(self._tags) for jump in jumps):
            return True
        waits = self._waits_of(member.others())
        for device, wanted_bytes in away_bytes(self._tags).items() if waits else ():
            info = _core.query_device(device)
            if startable_before(time.monotonic_ns(), waits, info.uuid.hex(), info.free_bytes):
                self._stand(device, wanted_bytes)
                return False
        return True

    def note_shortage(self, error: OutOfMemoryError) -> None:
        """A try has failed: the call stands in the queue of the device that was full. Where a limit of this process was
        the reason, it does not, so that it keeps nobody from room that it can't use."""
        self._error = error
        if member.files() is None or error.device < 0:
            return
        if error.requested_bytes <= _core.query_device(error.device).free_bytes:
            self._wait = None
            member.end_wait(self)
        elif self._wait is None or self._device != error.device or self._wait.wanted_bytes != error.requested_bytes:
            self._stand(error.device, error.requested_bytes)

    def may_try(self) -> bool:
        """Whether it is this call's turn. After some seconds, it says what it waits for.

        Raises: OutOfMemoryError: those that could make room wait, in the end for one another.
        """
        wait = self._wait
        if member.files() is None or wait is None or any(jump(self._tags) for jump in jumps):
            return True
        info, now = _core.query_device(self._device), time.monotonic()
        is_due = now - self._checked > _CHECK_SECONDS
        if info.free_bytes < wait.wanted_bytes and not is_due:
            return False
        others = member.others_now() if self._checked == 0 else member.others()
        if is_due:
            self._checked = now
            self._refuse_circle(wait, info, others)
            self._say_once(wait, info, others)
            self._ask_for_room(wait, info, others)
        earlier = startable_before(wait.since, self._waits_of(others), wait.device, info.free_bytes)
        self._startable = {each.since: self._startable.get(each.since, now) for each in earlier}
        return not any(now - since < _PATIENCE_SECONDS for since in self._startable.values())

    def nap(self, seconds: float) -> None:
        if self._wait is None:
            time.sleep(seconds)
        else:
            member.wait_for_room(min(seconds, _LONGEST_NAP_SECONDS))

    def describe_holders(self, error: OutOfMemoryError) -> str:
        """Of the device that had too little; "" where nobody else is known."""
        if member.files() is None or error.device < 0:
            return ""
        return describe_holders(member.others_now(), member.uuid_of(error.device))

    def _stand(self, device: int, wanted_bytes: int) -> None:
        since = time.monotonic_ns() if self._wait is None else self._wait.since
        self._device = device
        self._wait = Wait(member.uuid_of(device), wanted_bytes, self._tags, since)
        member.set_wait(self, self._wait)

    def _waits_of(self, others: list[Entry]) -> list[Wait]:
        """With those of other threads of this process."""
        return [wait for entry in others for wait in entry.waits] + member.waits_here()

    def _ask_for_room(self, wait: Wait, info: "_core.DeviceInfo", others: list[Entry]) -> None:
        """Of those that offer it, so many as it takes, the largest first; of none where all of it is too little. Each
        request is renewed as long as this call waits."""
        files, missing = member.files(), wait.wanted_bytes - info.free_bytes
        offers = sorted(others, key=lambda entry: -entry.offered_bytes(wait.device))
        if files is None or missing > sum(entry.offered_bytes(wait.device) for entry in offers):
            return
        for entry in offers:
            if missing <= 0 or not entry.offered_bytes(wait.device):
                return
            try:
                if (earlier := self._requests.get(entry.name)) and requests.is_known(files.folder, earlier):
                    self._requests[entry.name] = requests.renew(files.folder, earlier)
                else:
                    asker = f"{member.program_name()} {os.getpid()}"
                    request = requests.Request(requests.PAUSE, entry.gives_up, asker, missing)
                    self._requests[entry.name] = requests.ask(files.folder, entry.name, request)
            except StateError:
                return
            missing -= entry.offered_bytes(wait.device)

    def _refuse_circle(self, wait: Wait, info: "_core.DeviceInfo", others: list[Entry]) -> None:
        ours = info.held_bytes + sum(entry.held_bytes(wait.device) for entry in others)
        movable = max(info.total_bytes - info.free_bytes - ours, 0)  # of programs that are not ebbtide's
        if not member.is_alone():
            movable += info.held_bytes
        if can_never_start(wait, others, info.free_bytes, movable):
            self._error.args = (f"{self._error}. The processes that could make room wait for one another",)
            raise self._error

    def _say_once(self, wait: Wait, info: "_core.DeviceInfo", others: list[Entry]) -> None:
        if self._has_said or time.monotonic() - self._begin < _SILENT_SECONDS:
            return
        self._has_said = True
        what = ", ".join(self._tags) or "all tags"
        wanted, free = format_size(wait.wanted_bytes), format_size(info.free_bytes)
        say(
            f"the resume of {what} waits for {wanted} of device {self._device}, where {free} are free. "
            f"{describe_holders(others, wait.device)}"
        )


def away_bytes(tags: list[str]) -> dict[int, int]:
    """By device, the bytes that a resume of these tags (none: all) claims."""
    sums: dict[int, int] = {}
    for each in _core.allocations():
        away = each.size_bytes - each.resident_bytes
        if away > 0 and not each.is_trimmed and (not tags or each.tag in tags):
            sums[each.device] = sums.get(each.device, 0) + away
    return sums
