"""Memory of this process that others use: who has what, and how it leaves all the same.

All of it is done by the thread of `links`.
"""

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ebbtide import _core
from ebbtide.errors import Error, StateError
from ebbtide.processes import links, member
from ebbtide.processes.links import Link, Message, Result, number, text
from ebbtide.stderr import say

_SECONDS = 30.0  # for a borrower to let go, which waits for its device
_MOST_IDLE = 256


class _Offer(NamedTuple):
    """What a nonce stands for.

    Attributes:
        find: the storage; None: it is gone.
        held: the storage, until it is attached for the first time; or empty.
        generation: pauses of its tag so far. Later it is stale.
    """

    find: Callable[[], object | None]
    held: list[object]
    address: int
    size_bytes: int
    tag: str
    generation: int


@dataclass
class _Use:
    """Of one allocation by one borrower."""

    address: int
    tag: str
    may_leave: bool = True
    is_away: bool = False
    held: dict[str, list[object]] = field(default_factory=dict)  # storages, by nonce: once for each time attached


class Borrower:
    def __init__(self, link: Link) -> None:
        self.link, self.name = link, "a process"
        self.uses: dict[int, _Use] = {}  # by the allocation's sequence number
        self.awaited: dict[int, Result] = {}
        self.asked = 0

    def ask(self, message: Message, files: Iterable[int] = ()) -> Result:
        """What comes back is a problem, or ""."""
        result = Result()
        self.asked += 1
        self.awaited[self.asked] = result
        try:
            self.link.send({**message, "id": self.asked}, list(files))
        except StateError as error:
            result.put(str(error))
        return result


_offers: dict[str, _Offer] = {}
_borrowers: list[Borrower] = []
words: dict[str, Callable[[Borrower, Message, list[int]], None]] = {}  # of others than this module
on_end: list[Callable[[Link], None]] = []
_listener: list[Any] = []  # the entry's name, and how to end it
_purge_at = _MOST_IDLE


class Offered(NamedTuple):
    owner: str  # the name of this process's entry
    nonce: str
    generation: int


def offer(find: Callable[[], object | None], address: int, size_bytes: int, is_held: bool) -> Offered:
    """Lets other processes ask for this storage.

    Args:
        find: returns it; None once it is gone.
        is_held: keep it alive until it has been attached for the first time.

    Raises: StateError: it lies in no exportable memory; this process can't join the others.
    """
    info = _core.find(address)
    if info is None:
        raise StateError("this tensor lies in no region: saver.region(tag, exportable=True)")
    if not info.is_exportable:
        raise StateError(
            f"a tensor in tag {info.tag!r} can't be shared with another process, as its region was not entered with "
            "exportable=True"
        )
    found = _Offer(find, [find()] if is_held else [], address, size_bytes, info.tag, _core.pause_count(info.tag))
    name = listen()
    nonce: str = links.ask(partial(_add, found), _SECONDS)
    return Offered(name, nonce, found.generation)


def listen() -> str:
    """Joins the others, where this process has not, and lets them ask. Returns the name of its entry.

    Raises: StateError: it can't join them.
    """
    member.join()
    files = member.files()
    if files is None:
        raise StateError("this process shares nothing, since it could not join the others (a line above says why)")
    if not _listener or _listener[0] != files.name:
        links.ask(partial(_listen, files), _SECONDS)
    return files.name


def find_own(owner: str, nonce: str, generation: int) -> object | None:
    """The storage of an offer of this process; None where it is another's.

    Raises: StateError: it is stale.
    """
    files = member.files()
    if files is None or files.name != owner:
        return None
    return _find(nonce, generation)


def are_used() -> bool:
    return any(borrower.uses for borrower in _borrowers)


def make_way(tags: list[str]) -> None:
    """Before memory of these tags (none: all) leaves: those who agreed let go of it.

    Raises: StateError: others use it, who did not agree, or can't let go now.
    """
    if not are_used():
        return
    asked = links.ask(partial(_ask_to_let_go, tags), _SECONDS)
    problems = [f"{name}: {problem}" for name, result in asked if (problem := result.get(_SECONDS))]
    if problems:
        raise StateError("memory that other processes use can't leave now: " + "; ".join(problems))


def give_back() -> None:
    """After an operation: who let go of memory that is here gets it again."""
    if not are_used():
        return
    for name, result in links.ask(_give_back, _SECONDS):
        if problem := result.get(_SECONDS):
            say(f"{name} did not get its memory of this process back: {problem}")


def _listen(files: Any) -> None:
    if not _listener or _listener[0] != files.name:
        _stop_listening()
        _listener[:] = [files.name, links.listen(files.folder.place / (files.name + links.ENDING), _begin)]


def _add(found: _Offer) -> str:
    _purge()
    for nonce, each in _offers.items():
        if each[2:] == found[2:] and each.find() is not None:
            each.held.extend(found.held[len(each.held) :])
            return nonce
    nonce = secrets.token_hex(16)
    _offers[nonce] = found
    return nonce


def _stop_listening() -> None:
    if _listener:
        _listener[1]()
        _listener.clear()


def _purge() -> None:
    global _purge_at
    if len(_offers) >= _purge_at:
        for nonce in [nonce for nonce, each in _offers.items() if each.find() is None]:
            del _offers[nonce]
        _purge_at = max(_MOST_IDLE, 2 * len(_offers))


def _find(nonce: str, generation: int) -> object:
    found = _offers.get(nonce)
    storage = found.find() if found is not None else None
    if found is None or storage is None:
        raise StateError("this share is stale: its tensor is gone")
    if generation != found.generation or _core.pause_count(found.tag) != generation:
        raise StateError(f"this share is stale: tag {found.tag!r} was paused since. Share the tensor again")
    return storage


def _begin(link: Link) -> None:
    borrower = Borrower(link)
    _borrowers.append(borrower)
    link.start(partial(_read, borrower), partial(_end, borrower))


def _end(borrower: Borrower) -> None:
    _borrowers.remove(borrower)
    for key in list(borrower.uses):
        _end_use(borrower, key)
    for result in borrower.awaited.values():
        result.put("")
    for each in on_end:
        each(borrower.link)


def _end_use(borrower: Borrower, key: int) -> None:
    use = borrower.uses.pop(key, None)
    if use is not None and not use.is_away:
        _core.end_export(use.address)


def _read(borrower: Borrower, message: Message, files: list[int]) -> None:
    what = text(message, "what")
    if what == "hello":
        borrower.name = text(message, "name")
    elif what == "want":
        _lend(borrower, message)
    elif what == "done":
        if result := borrower.awaited.pop(number(message, "id"), None):
            result.put(text(message, "problem"))
    elif what == "drop":
        use = borrower.uses.get(number(message, "key"))
        held = use.held.get(text(message, "nonce"), []) if use is not None else []
        if held:
            held.pop()
    elif what == "end":
        _end_use(borrower, number(message, "key"))
    elif what in words:
        words[what](borrower, message, files)


def _lend(borrower: Borrower, message: Message) -> None:
    identity = number(message, "id")
    try:
        answer, files = _prepare_loan(borrower, message)
    except (Error, OSError) as error:
        borrower.link.send({"what": "loan", "id": identity, "problem": str(error)})
        return
    try:
        borrower.link.send({"what": "loan", "id": identity, "problem": "", **answer}, files)
    except StateError:
        borrower.link.end()
    finally:
        for file in files:
            os.close(file)


def _prepare_loan(borrower: Borrower, message: Message) -> tuple[Message, list[int]]:
    if number(message, "version") != links.VERSION:
        raise StateError("the two programs have different versions of ebbtide")
    nonce, generation = text(message, "nonce"), number(message, "generation")
    storage = _find(nonce, generation)
    offered = _offers[nonce]
    info = _core.find(offered.address)
    if info is None:
        raise StateError("this share is stale: its memory is gone")
    pieces: list[tuple[int, int]] = []
    key = info.sequence
    use = borrower.uses.get(key)
    if use is not None and use.is_away:
        raise StateError(f"tag {info.tag!r} is paused: attach after its resume")
    if use is None:
        pieces = _core.export(offered.address)
        use = borrower.uses[key] = _Use(info.address, info.tag)
    use.may_leave &= message.get("agrees") is True
    use.held.setdefault(nonce, []).append(storage)
    offered.held.clear()
    return {
        "key": key,
        "offset": offered.address - info.address,
        "size": offered.size_bytes,
        "device": member.uuid_of(info.device),
        "sizes": [size for size, _ in pieces],
    }, [file for _, file in pieces]


def _uses_of(tags: list[str]) -> list[tuple[Borrower, int, _Use]]:
    return [
        (borrower, key, use)
        for borrower in _borrowers
        for key, use in borrower.uses.items()
        if not use.is_away and (not tags or use.tag in tags)
    ]


def _ask_to_let_go(tags: list[str]) -> list[tuple[str, Result]]:
    found = _uses_of(tags)
    for borrower, _, use in found:
        if not use.may_leave:
            count = sum(len(held) for held in use.held.values())
            raise StateError(
                f"tag {use.tag!r} can't leave: {borrower.name} uses {count} of its tensors. It can let go of them, or "
                "agree to pauses (saver.attach(..., pauseable=True))"
            )
    asked = []
    for borrower, key, use in found:
        use.is_away = True
        _core.end_export(use.address)
        asked.append((borrower.name, borrower.ask({"what": "lose", "key": key})))
    return asked


def _give_back() -> list[tuple[str, Result]]:
    asked = []
    for borrower in list(_borrowers):
        for key, use in borrower.uses.items():
            info = _core.find(use.address) if use.is_away else None
            if info is None or info.sequence != key or info.resident_bytes - info.host_bytes != info.size_bytes:
                continue
            use.is_away = False
            asked.append((borrower.name, _send_back(borrower, key, _core.export(use.address))))
    return asked


def _send_back(borrower: Borrower, key: int, pieces: list[tuple[int, int]]) -> Result:
    files = [file for _, file in pieces]
    try:
        return borrower.ask({"what": "back", "key": key, "sizes": [size for size, _ in pieces]}, files)
    finally:
        for file in files:
            os.close(file)


def forget_parent() -> None:
    """In a forked child: all of this is the parent's. What stays open keeps others from knowing that it has ended."""
    for borrower in _borrowers:
        borrower.link.close_in_child()
    _stop_listening()
    _borrowers.clear()
    _offers.clear()
