"""Memory of other processes that this one uses.

All of it is done by the thread of `links`.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial

from ebbtide import _core
from ebbtide.errors import Error, StateError
from ebbtide.processes import links, member
from ebbtide.processes.folder import Folder, path
from ebbtide.processes.links import Link, Message, Result, number, text
from ebbtide.stderr import say

_SECONDS = 30.0  # for an owner to answer
_AGAIN_SECONDS = 0.5  # after which memory that could not be given up is tried again


class Loan:
    """A storage of another process, which is given up with this object, by whatever thread."""

    def __init__(self, address: int, size_bytes: int, device: int, release: Callable[[], None]) -> None:
        self.address, self.size_bytes, self.device = address, size_bytes, device
        self._release, self._pid = release, os.getpid()

    def __del__(self) -> None:
        # At the interpreter's exit the kernel gives it up with the process, and in a forked child it is the parent's.
        if os is not None and self._pid == os.getpid() and not sys.is_finalizing():
            links.post(self._release)


class _Part:
    """An allocation of an owner, mapped here."""

    def __init__(self, memory: "_core.Import", device: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.memory, self.device, self.is_mapped = memory, device, True
        self.loans: set[int] = set()


class Owner:
    def __init__(self, link: Link) -> None:
        self.link = link
        self.parts: dict[int, _Part] = {}
        self.wanted: dict[int, Result] = {}
        self.givings: dict[int, Callable[[Message | None], None]] = {}  # who hears of a hand-over to it; None: it ended
        self._asked = 0

    def next_number(self) -> int:
        """Of what is asked of it, or offered to it."""
        self._asked += 1
        return self._asked


_owners: dict[str, Owner] = {}
words: dict[str, Callable[[Owner, Message, list[int]], None]] = {}  # of others than this module


def borrow(owner: str, nonce: str, generation: int, agrees: bool) -> Loan:
    """
    Raises: StateError: the owner is gone, can't be reached or refuses, the share is stale, or the device is none of
        this process's.
    """
    result: Result = links.ask(partial(_want, owner, nonce, generation, agrees), _SECONDS)
    loan: Loan = result.get(_SECONDS)
    return loan


def _want(owner: str, nonce: str, generation: int, agrees: bool) -> Result:
    found = meet(owner)
    result = Result()
    identity = found.next_number()
    found.wanted[identity] = result
    request = {"what": "want", "version": links.VERSION, "id": identity, "nonce": nonce, "generation": generation}
    try:
        found.link.send({**request, "agrees": agrees})
    except StateError:
        del found.wanted[identity]
        raise
    return result


def meet(name: str) -> Owner:
    """The process with this entry.

    Raises: StateError: it is gone, or can't be reached.
    """
    if name in _owners:
        return _owners[name]
    place = path()
    if not isinstance(name, str) or "/" in name or not place.is_dir():
        raise StateError(_gone(name))
    try:
        link = links.connect(Folder(place).place / (name + links.ENDING))
    except StateError as error:
        raise StateError(f"{_gone(name)} ({error})") from None
    owner = _owners[name] = Owner(link)
    link.start(partial(_read, owner), partial(_end, name, owner))
    try:
        link.send({"what": "hello", "name": f"{member.program_name()} {os.getpid()}"})
    except StateError:
        link.end()
        raise
    return owner


def _gone(name: str) -> str:
    return f"the process {name.partition('-')[0]} that shared this is gone, or lies in another EBBTIDE_SHARED_FOLDER"


def _end(name: str, owner: Owner) -> None:
    """The memory lives on as long as it is used here."""
    if _owners.get(name) is owner:
        del _owners[name]
    for result in owner.wanted.values():
        result.fail(StateError("the process that shared this has ended"))
    owner.wanted.clear()
    for hear in list(owner.givings.values()):
        hear(None)


def _read(owner: Owner, message: Message, files: list[int]) -> None:
    what, identity = text(message, "what"), number(message, "id")
    if what == "loan":
        result = owner.wanted.pop(identity)
        try:
            result.put(_take(owner, identity, message, files))
        except (Error, ValueError, TypeError, KeyError, OverflowError) as error:
            makes_sense = isinstance(error, Error)
            result.fail(error if makes_sense else StateError(f"the owner's answer makes no sense: {error}"))
            _decline(owner, identity, message)
    elif what in ("lose", "back"):
        part, problem = owner.parts.get(number(message, "key")), ""
        try:
            if part is not None and what == "lose":
                part.memory.unmap()
                part.is_mapped = False
            elif part is not None and not part.is_mapped:
                part.memory.unmap()  # what an earlier failure has left
                part.memory.map(_pieces(message, files))
                part.is_mapped = True
        except Error as error:
            problem = str(error)
        owner.link.send({"what": "done", "id": identity, "problem": problem})
    elif what in words:
        words[what](owner, message, files)


def _decline(owner: Owner, loan: int, message: Message) -> None:
    """A loan that could not be taken, where it is one."""
    if "key" in message:
        key = number(message, "key")
        is_first = key not in owner.parts
        owner.link.send({"what": "end", "key": key} if is_first else {"what": "drop", "key": key, "loan": loan})


def _pieces(message: Message, files: list[int]) -> list[tuple[int, int]]:
    if problem := message.get("problem"):
        raise StateError(str(problem))
    sizes = message["sizes"]
    if not isinstance(sizes, list) or len(sizes) != len(files):
        raise StateError("the owner's answer has another number of pieces than of descriptors")
    return [(number({"size": size}, "size"), file) for size, file in zip(sizes, files, strict=True)]


def _take(owner: Owner, loan: int, message: Message, files: list[int]) -> Loan:
    if problem := message.get("problem"):
        raise StateError(str(problem))
    key, offset, size = number(message, "key"), number(message, "offset"), number(message, "size")
    part = owner.parts.get(key)
    if part is None:
        part = owner.parts[key] = _map(message, files, offset + size)
    part.loans.add(loan)
    return Loan(part.memory.address + offset, size, part.device, partial(_release, owner, key, part, loan))


def _map(message: Message, files: list[int], needed_bytes: int) -> _Part:
    device, pieces = device_with(text(message, "device")), _pieces(message, files)
    if needed_bytes > sum(each for each, _ in pieces):
        raise StateError("the owner's answer reaches beyond its memory")
    return _Part(_core.Import(device, pieces), device, sum(each for each, _ in pieces))


def device_with(uuid: str) -> int:
    """
    Raises: StateError: this process does not see it.
    """
    for device in range(_core.device_count()):
        if member.uuid_of(device) == uuid:
            return device
    raise StateError("the shared memory lies on a GPU that this process does not see: set CUDA_VISIBLE_DEVICES")


def _release(owner: Owner, key: int, part: _Part, loan: int) -> None:
    """Again later during a capture, which a wait for the device would break."""
    try:
        part.memory.wait()  # what reads it, before its owner gives it to another
    except StateError:
        links.later(_AGAIN_SECONDS, partial(_release, owner, key, part, loan))
        return
    except Error as error:  # the device is lost, and with it whatever would read
        say(f"the end of a loan: {error}")
    part.loans.discard(loan)
    if owner.link.is_open:
        with contextlib.suppress(StateError):
            owner.link.send({"what": "drop", "key": key, "loan": loan})
    _free_unused(owner, key, part)


def is_borrowed(address: int) -> bool:
    """Whether memory of another process is there."""
    parts = [part for owner in list(_owners.values()) for part in list(owner.parts.values())]
    return any(0 <= address - part.memory.address < part.size_bytes for part in parts)


def _free_unused(owner: Owner, key: int, part: _Part) -> None:
    """Again later during a capture, which it would break, and while an answer is on its way that may use it."""
    if part.loans or owner.parts.get(key) is not part:
        return
    try:
        if owner.wanted:
            raise StateError
        part.memory.free()
    except Error:
        links.later(_AGAIN_SECONDS, partial(_free_unused, owner, key, part))
        return
    del owner.parts[key]
    if owner.link.is_open:
        owner.link.send({"what": "end", "key": key})


def forget_parent() -> None:
    """In a forked child: all of this is the parent's."""
    for owner in _owners.values():
        owner.link.close_in_child()
    _owners.clear()
