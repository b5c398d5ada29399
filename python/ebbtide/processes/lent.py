"""Memory of this process that others use: who has what, and how it leaves all the same.

A borrower that agreed loses the memory once a pause has checked and taken all that it needs, and has it again when it
is here. What could not be given back at once, since an operation holds the tag or the borrower does not answer, is
tried again.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ebbtide import _core
from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock
from ebbtide.processes import folder, links, member, offers
from ebbtide.processes.links import Link, Message, Result, number, text
from ebbtide.processes.offers import Offered
from ebbtide.stderr import say

_LEAVE_SECONDS = 20.0  # for borrowers to let go, which wait for their device
_BACK_SECONDS = 5.0  # for borrowers to have it again, before the resume returns
_BUSY_SECONDS = 20.0  # for an operation that holds a tag of which something is wanted
_AGAIN_SECONDS = 0.2

_lock = make_lock()  # of all that follows


@dataclass
class _Use:
    """Of one allocation by one borrower. `is_asked`: `is_away` is about to change."""

    address: int
    tag: str
    loans: dict[int, tuple[object, bool]] = field(default_factory=dict)  # storages; whether their user agrees
    refuses: bool = False  # known to the core
    is_away: bool = False
    is_asked: bool = False


class Borrower:
    def __init__(self, link: Link) -> None:
        self.link, self.name, self.asked = link, "a process", 0
        self.uses: dict[int, _Use] = {}  # by the allocation's sequence number
        self.awaited: dict[int, Callable[[str], None]] = {}  # who gets the answer: a problem, or ""

    def ask(self, message: Message, files: list[int], hear: Callable[[str], None]) -> None:
        self.asked += 1
        self.awaited[self.asked] = hear
        try:
            self.link.send({**message, "id": self.asked}, files)
        except StateError as error:
            self.awaited.pop(self.asked, bool)(str(error))


_borrowers: list[Borrower] = []
words: dict[str, Callable[[Borrower, Message, list[int]], None]] = {}  # of others than this module
on_end: list[Callable[[Link], None]] = []
_listener: list[Any] = []  # the entry's name, and how to end it
_is_looking = False  # whether what is away is looked at again


def offer(find: Callable[[], object | None], address: int, size_bytes: int, is_held: bool) -> Offered:
    """Lets other processes ask for this storage.

    Args:
        find: returns it; None once it is gone.
        is_held: keep it alive until it has been attached for the first time.

    Raises: StateError: it lies in no exportable memory; this process can't join the others.
    """
    offers.check(address)
    name = listen()
    with _lock:
        return Offered(name, *offers.add(find, address, size_bytes, is_held))


def listen() -> str:
    """Joins the others, where this process has not, and lets them ask. Returns the name of its entry.

    Raises: StateError: it can't join them.
    """
    member.join()
    files = member.files()
    if files is None:
        raise StateError("this process shares nothing, since it could not join the others (a line above says why)")
    with _lock:
        if not _listener or _listener[0] != files.name:
            stop_listening()
            _listener[:] = [files.name, links.listen(files.folder.place / (files.name + links.ENDING), _begin)]
    return str(files.name)


def is_listening() -> bool:
    """Whether other processes may use memory of this one."""
    return bool(_listener)


def stop_listening() -> None:
    """Nobody can ask any more. What is lent stays so."""
    if _listener:
        _listener[1]()
        _listener.clear()


def find_own(owner: str, nonce: str, generation: int) -> object | None:
    """The storage of an offer of this process; None where it is another's.

    Raises: StateError: it is stale.
    """
    if not folder.was_own(owner):
        return None
    with _lock:
        storage, offered = offers.find(nonce, generation)
        offered.held.clear()
        return storage


# --- borrowers: what they send is heard by the thread of `links` ---


def _begin(link: Link) -> None:
    borrower = Borrower(link)
    with _lock:
        _borrowers.append(borrower)
    link.start(partial(_read, borrower), partial(_end, borrower))


def _end(borrower: Borrower) -> None:
    with _lock:
        _borrowers.remove(borrower)
        for key in list(borrower.uses):
            _end_use(borrower, key)
        waiting, borrower.awaited = list(borrower.awaited.values()), {}
    for hear in waiting:
        hear("")
    for each in on_end:
        each(borrower.link)


def _read(borrower: Borrower, message: Message, files: list[int]) -> None:
    what = text(message, "what")
    if what == "hello":
        borrower.name = text(message, "name")
    elif what == "want":
        _lend(borrower, message, time.monotonic() + _BUSY_SECONDS)
    elif what == "done":
        problem = text(message, "problem")
        with _lock:
            hear = borrower.awaited.pop(number(message, "id"), bool)
        hear(problem)
    elif what == "drop":
        _drop(borrower, number(message, "key"), number(message, "loan"))
    elif what == "end":
        with _lock:
            _end_use(borrower, number(message, "key"))
    elif what in words:
        words[what](borrower, message, files)


def _end_use(borrower: Borrower, key: int) -> None:
    use = borrower.uses.pop(key, None)
    if use is not None and use.refuses:
        _core.refuse_moves(use.address, False)
    if use is not None and not use.is_away:
        _core.end_export(use.address)


def _drop(borrower: Borrower, key: int, loan: int) -> None:
    with _lock:
        if (use := borrower.uses.get(key)) is not None:
            use.loans.pop(loan, None)
            _tell_core(use)


def _tell_core(use: _Use) -> None:
    refuses = not all(agrees for _, agrees in use.loans.values())
    if refuses != use.refuses:
        use.refuses = refuses
        _core.refuse_moves(use.address, refuses)


def _lend(borrower: Borrower, message: Message, deadline: float) -> None:
    if not borrower.link.is_open:
        return
    identity = number(message, "id")
    files: list[int] = []
    try:
        with _lock:
            answer = _prepare_loan(borrower, message, files)
        if answer is None and time.monotonic() < deadline:  # an operation holds the tag, and this thread waits for none
            links.later(_AGAIN_SECONDS / 10, partial(_lend, borrower, message, deadline))
            return
        problem = "" if answer is not None else "an operation on this tensor's tag takes too long"
        borrower.link.send({"what": "loan", "id": identity, **(answer or {}), "problem": problem}, files)
    except (Error, OSError) as error:
        borrower.link.send({"what": "loan", "id": identity, "problem": str(error)})
    finally:
        for file in files:
            os.close(file)


def _prepare_loan(borrower: Borrower, message: Message, files: list[int]) -> Message | None:
    """Its descriptors are added to `files`. None: an operation holds the tag."""
    if number(message, "version") != links.VERSION:
        raise StateError("the two programs have different versions of ebbtide")
    nonce = text(message, "nonce")
    storage, offered = offers.find(nonce, number(message, "generation"))
    info = _core.find(offered.address)
    if info is None:
        raise StateError("this share is stale: its memory is gone")
    device = member.uuid_of(info.device)
    use, sizes = borrower.uses.get(info.sequence), []
    if use is not None and use.is_asked:
        return None
    if use is not None and use.is_away:
        raise StateError(f"tag {info.tag!r} is paused: attach after its resume")
    if use is None:
        pieces = _core.export(offered.address)
        if pieces is None:
            return None
        files += [file for _, file in pieces]
        sizes = [size for size, _ in pieces]
        use = borrower.uses[info.sequence] = _Use(info.address, info.tag)
    use.loans[number(message, "id")] = (storage, message.get("agrees") is True)
    _tell_core(use)
    offered.held.clear()
    where = {"key": info.sequence, "offset": offered.address - info.address, "size": offered.size_bytes}
    return {**where, "device": device, "sizes": sizes}


# --- pauses and resumes, by whatever thread ---


def are_used() -> bool:
    with _lock:
        return any(borrower.uses for borrower in _borrowers)


def _uses(tags: list[str]) -> list[tuple[Borrower, int, _Use]]:
    """Of memory of these tags; none means all. Under the lock."""
    return [
        (borrower, key, use)
        for borrower in _borrowers
        for key, use in borrower.uses.items()
        if not tags or use.tag in tags
    ]


def make_way(tags: list[str]) -> None:
    """Before memory of these tags (none: all), which an operation holds, leaves: those who agreed let go of it.

    Raises: StateError: others use it, who did not agree, or can't let go now.
    """
    with _lock:
        asked = _ask_all(tags)
    deadline, problems = time.monotonic() + _LEAVE_SECONDS, []
    for name, result in asked:
        problems += [f"{name}: {problem}"] if (problem := _answer(result, deadline)) else []
    if problems:
        raise StateError("memory that other processes use can't leave now: " + "; ".join(problems))


def _ask_all(tags: list[str]) -> list[tuple[str, Result]]:
    found = [each for each in _uses(tags) if not each[2].is_away and not _is_kept(each[2])]
    _refuse_if_used(found)
    return [(f"{borrower.name}, tag {use.tag!r}", _ask_to_let_go(borrower, key, use)) for borrower, key, use in found]


def _refuse_if_used(found: list[tuple[Borrower, int, _Use]]) -> None:
    for borrower, _, use in found:
        count = sum(not agrees for _, agrees in use.loans.values())
        if count:
            raise StateError(
                f"tag {use.tag!r} can't leave: {borrower.name} uses {count} of its tensors. It can let go of them, or "
                "agree to pauses (saver.attach(..., pauseable=True))"
            )


def explain_refusal(tags: list[str]) -> None:
    """Where the core has refused to take memory away since other processes use it.

    Raises: StateError: with their names.
    """
    with _lock:
        _refuse_if_used(_uses(tags))


def _is_kept(use: _Use) -> bool:
    info = _core.find(use.address)
    return info is not None and info.is_kept


def _answer(result: Result, deadline: float) -> str:
    try:
        return str(result.get(max(deadline - time.monotonic(), 0.0)))
    except StateError:
        return "it does not answer (is it stopped?)"


def _ask_to_let_go(borrower: Borrower, key: int, use: _Use) -> Result:
    result = Result()
    use.is_asked = True

    def hear(problem: str) -> None:
        with _lock:
            use.is_asked = False
            if not problem and borrower.uses.get(key) is use:
                use.is_away = True
                _core.end_export(use.address)
        result.put(problem)

    borrower.ask({"what": "lose", "key": key}, [], hear)
    _look_again()
    return result


def give_back(waits: bool) -> None:
    """Who let go of memory that is here gets it again. Never fails: what can't be given back now is tried again.

    Args:
        waits: some seconds, until they have it.
    """
    if not _borrowers:
        return
    with _lock:
        asked = _send_all_back()
    deadline = time.monotonic() + (_BACK_SECONDS if waits else 0.0)
    for name, result in asked if waits else ():
        if result is not None and (problem := _answer(result, deadline)):
            say(f"{name} does not have its memory of this process back yet: {problem}")


def _send_all_back() -> list[tuple[str, Result | None]]:
    away = [each for each in _uses([]) if each[2].is_away and not each[2].is_asked]
    return [(borrower.name, _send_back(borrower, key, use)) for borrower, key, use in away]


def _send_back(borrower: Borrower, key: int, use: _Use) -> Result | None:
    """None: it is not here, or can't be exported now."""
    info = _core.find(use.address)
    if info is None or info.sequence != key or info.resident_bytes - info.host_bytes != info.size_bytes:
        return None
    try:
        pieces = _core.export(use.address)
    except Error as error:
        say(f"memory that {borrower.name} uses can't be given back now: {error}")
        return None
    if pieces is None:
        return None
    result = Result()
    use.is_asked = True

    def hear(problem: str) -> None:
        with _lock:
            use.is_asked = False
            if borrower.uses.get(key) is use and not problem:
                use.is_away = False
            else:
                _core.end_export(use.address)
        result.put(problem)

    files = [file for _, file in pieces]
    try:
        borrower.ask({"what": "back", "key": key, "sizes": [size for size, _ in pieces]}, files, hear)
    finally:
        for file in files:
            os.close(file)
    return result


def _look_again() -> None:
    """As long as anything is away: a resume in the background has come to its end, say."""
    global _is_looking
    if not _is_looking:
        _is_looking = True
        links.post(partial(links.later, _AGAIN_SECONDS, _look))


def _look() -> None:
    global _is_looking
    give_back(waits=False)
    with _lock:
        _is_looking = any(use.is_away or use.is_asked for _, _, use in _uses([]))
    if _is_looking:
        links.later(_AGAIN_SECONDS, _look)


def forget_parent() -> None:
    """In a forked child: all of this is the parent's. What stays open keeps others from knowing that it has ended."""
    global _is_looking
    _is_looking = False
    for borrower in _borrowers:
        borrower.link.close_in_child()
    stop_listening()
    _borrowers.clear()
    offers.forget_parent()
