"""Memory that goes from a pause of one process to a resume of another, while nobody else can take it.

The one that pauses offers it; the next resume of the other takes the offer, says which handles it wants, and the pause
begins. Handles go as descriptors; what is released instead is told, as it is room for the other.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ebbtide import _core
from ebbtide.errors import Error, OutOfMemoryError, StateError
from ebbtide.locks import make_lock
from ebbtide.processes import borrowed, lent, links, member, queue
from ebbtide.processes.links import Link, Message, Result, number, text

_lock = make_lock()
_SECONDS = 30.0
_MOST_HANDLES = 1 << 20


# --- the one that resumes ---


@dataclass(eq=False)
class _Offer:
    """Of another process, to this one."""

    link: Link
    name: str
    identity: int
    leaving: list[tuple[int, int, bool]]  # handles: the device, the size, whether they can be given
    must_clear: bool
    reception: Any = None
    wanted: Counter[tuple[int, int]] = field(default_factory=Counter)
    is_accepted: bool = False
    problem: str | None = None  # "" once all has come

    @property
    def devices(self) -> set[int]:
        return {device for device, _, _ in self.leaving}


_offers: list[_Offer] = []


def is_offered(tags: list[str]) -> bool:
    """Whether another process offers memory on a device where a resume of these tags (none: all) wants some."""
    return bool(_offers) and any(each.devices & set(queue.away_bytes(tags)) for each in list(_offers))


def resume_or_receive(tags: list[str], missing_ok: bool, **options: Any) -> "_core.Report":
    """A resume, with the memory of another process if one offers it.

    Raises: OutOfMemoryError: also where the other process has ended midway: the same call goes on.
    """
    with contextlib.suppress(StateError):  # this process may have left the others and joined them anew
        if member.files() is not None:
            lent.listen()
    offer = _take_offer(tags)
    if offer is None:
        return _core.resume(tags, missing_ok, **options)
    offer.reception = _core.Reception(offer.leaving, offer.must_clear)
    if offer.problem is not None:  # it came to its end meanwhile
        offer.reception.end()
    try:
        return offer.reception.resume(tags, missing_ok, partial(_want, offer), **options)
    except OutOfMemoryError:
        if not offer.is_accepted and offer.problem is None:
            with _lock:  # for the next try, or `decline`
                _offers.insert(0, offer)
        raise
    except StateError as error:
        if not offer.is_accepted:
            _decline(offer)
            raise
        why = f": {offer.problem}" if offer.problem else ""
        text = f"{offer.name} has handed over less than it offered{why}. A resume finishes with what is free ({error})"
        raise OutOfMemoryError(text) from None


def _take_offer(tags: list[str]) -> _Offer | None:
    away = set(queue.away_bytes(tags)) if _offers else set()
    return next((each for each in list(_offers) if each.devices & away and _take(each)), None)


def decline(tags: list[str]) -> None:
    """After a resume of these tags that has failed for good: who offers memory for it need not wait."""
    if _offers:
        away = set(queue.away_bytes(tags))
        for offer in [each for each in list(_offers) if each.devices & away]:
            if _take(offer):
                _decline(offer)


def release_unneeded() -> None:
    """Where nothing is away any more, memory that is offered is released instead: its process need not wait."""
    if _offers:
        away = set(queue.away_bytes([]))
        for offer in [each for each in list(_offers) if not each.devices & away]:
            if _take(offer):
                offer.is_accepted = True
                _tell_giver(offer, {"what": "accept", "wanted": []})


def _take(offer: _Offer) -> bool:
    """Whether it is there still: then it is the caller's."""
    with _lock:
        if offer in _offers:
            _offers.remove(offer)
            return True
        return False


def _want(offer: _Offer, device: int, size_bytes: int) -> bool:
    """Called by the resume, once for each handle; with -1 when it is ready. It goes on if this returns."""
    if device >= 0:
        offer.wanted[device, size_bytes] += 1
        return True
    wanted = [[member.uuid_of(device), size, count] for (device, size), count in offer.wanted.items()]
    offer.link.send({"what": "accept", "id": offer.identity, "wanted": wanted})
    offer.is_accepted = True
    return True


def _decline(offer: _Offer) -> None:
    """Where the resume has failed before it could want anything."""
    if not offer.is_accepted:
        _tell_giver(offer, {"what": "decline", "problem": "its resume failed"})


def _tell_giver(offer: _Offer, message: Message) -> None:
    """It may have ended, which must not fail a resume."""
    with contextlib.suppress(StateError):
        offer.link.send({**message, "id": offer.identity})


def _hear_offer(borrower: "lent.Borrower", message: Message, files: list[int]) -> None:
    what, identity = text(message, "what"), number(message, "id")
    if what == "offer":
        if number(message, "version") != links.VERSION:
            raise ValueError("another version")
        try:
            leaving = _read_leaving(message)
        except StateError as error:  # a device that this process does not see
            borrower.link.send({"what": "decline", "id": identity, "problem": str(error)})
            return
        _offers.append(_Offer(borrower.link, borrower.name, identity, leaving, message.get("must_clear") is not False))
        _known[borrower.link, identity] = _offers[-1]
        member.wake()
        release_unneeded()
        return
    offer = _known.get((borrower.link, identity))
    if offer is None:
        return
    if what == "over":
        _end_offer(offer, text(message, "problem"))
    elif offer.reception is not None:
        device, size = borrowed.device_with(text(message, "device")), number(message, "size")
        if what == "handle" and files:
            offer.reception.receive(device, size, files.pop())  # which closes it
        else:
            offer.reception.note_released(device, size)


_known: dict[tuple[Link, int], _Offer] = {}


def _read_leaving(message: Message) -> list[tuple[int, int, bool]]:
    leaving: list[tuple[int, int, bool]] = []
    for uuid, size, is_exportable, count in message["leaving"]:
        of_these = (borrowed.device_with(str(uuid)), number({"n": size}, "n"), is_exportable is True)
        leaving += [of_these] * min(number({"n": count}, "n"), _MOST_HANDLES)
    return leaving


def _end_offer(offer: _Offer, problem: str) -> None:
    _known.pop((offer.link, offer.identity), None)
    if offer in _offers:
        _offers.remove(offer)
    offer.problem = problem
    if offer.reception is not None:
        offer.reception.end()


def _forget_link(link: Link) -> None:
    for (of, _), offer in list(_known.items()):
        if of is link:
            _end_offer(offer, "it has ended")


# --- the one that pauses ---


class Giving:
    """A hand-over to the process with this PID, from `offer` to `end`.

    Raises: StateError: there is no such process, or several; it shares no exportable memory.
    """

    def __init__(self, peer: int, tags: list[str]) -> None:
        names = [each.name for each in member.others() if each.pid == peer]
        if member.files() is None or len(names) != 1:
            there = ", ".join(f"{each.program} {each.pid}" for each in member.others()) or "none"
            raise StateError(f"{'no' if not names else 'more than one'} process {peer} shares here; others: {there}")
        self._name, self._tags = names[0], tags
        self._accepted = Result()
        self._wanted: Counter[tuple[int, int]] = Counter()
        self._identity = 0
        self._owner: borrowed.Owner | None = None
        self._is_gone = False
        self._lock = make_lock()

    def offer(self, seconds: float) -> None:
        """Waits until a resume of the other takes it.

        Raises: StateError: it declined, has ended, or took nothing in that time. Nothing has moved.
        """
        self._owner = links.ask(self._send_offer, _SECONDS)
        try:
            wanted = self._accepted.get(seconds)
        except StateError as error:
            raise StateError(
                f"{error}: the process has not taken the memory with a resume. Nothing has moved"
            ) from None
        for uuid, size, count in wanted:
            self._wanted[borrowed.device_with(str(uuid)), number({"n": size}, "n")] += number({"n": count}, "n")

    def _send_offer(self) -> "borrowed.Owner":
        try:
            owner = borrowed.meet(self._name)
        except StateError as error:
            raise StateError(
                f"this process takes no memory: a region of it must say exportable=True ({error})"
            ) from None
        self._identity = owner.next_number()
        counts = Counter(_core.find_leaving(self._tags))
        leaving = [[member.uuid_of(device), *rest, count] for (device, *rest), count in counts.items()]
        owner.givings[self._identity] = self._hear
        must_clear = _core.get_setting("clear_handed") != b"0"
        head = {"what": "offer", "version": links.VERSION, "id": self._identity}
        owner.link.send({**head, "must_clear": must_clear, "leaving": leaving})
        return owner

    def _hear(self, message: Message | None) -> None:
        if message is None:
            self._accepted.fail(StateError("the other process has ended"))
        elif message["what"] == "accept":
            self._accepted.put(message["wanted"])
        else:
            self._accepted.fail(StateError(text(message, "problem")))

    def wants(self, device: int, size_bytes: int) -> bool:
        with self._lock:
            is_wanted = self._wanted[device, size_bytes] > 0
            self._wanted[device, size_bytes] -= is_wanted
            return is_wanted

    def give(self, device: int, size_bytes: int, file: int) -> bool:
        return self._tell("handle", device, size_bytes, [file])

    def released(self, device: int, size_bytes: int) -> None:
        self._tell("room", device, size_bytes, [])

    def _tell(self, what: str, device: int, size_bytes: int, files: list[int]) -> bool:
        if self._owner is None or self._is_gone or not self._owner.link.is_open:
            return False
        message = {"what": what, "id": self._identity, "device": member.uuid_of(device), "size": size_bytes}
        try:
            self._owner.link.send(message, files)
        except StateError:  # one that reads nothing costs each send some seconds
            self._is_gone = True
            return False
        return True

    def end(self, problem: str) -> None:
        """Says that no more will come, and why: "" where all has."""
        owner = self._owner
        if owner is not None:
            owner.givings.pop(self._identity, None)
            with contextlib.suppress(StateError):
                owner.link.send({"what": "over", "id": self._identity, "problem": problem})


def hand_over(
    peer: int, seconds: float, tags: list[str], missing_ok: bool, pause: Callable[..., "_core.Report"], **options: Any
) -> "_core.Report":
    """Offers the memory of these tags, and pauses them once the other process takes it.

    Args:
        pause: `_core.hand_over`, which gets the three functions of a receiver.
    """
    giving = Giving(peer, tags)
    problem = "it was interrupted"
    try:
        giving.offer(seconds)
        report = pause(tags, missing_ok, wants=giving.wants, give=giving.give, released=giving.released, **options)
        problem = ""
        return report
    except Error as error:
        problem = str(error)
        raise
    finally:
        giving.end(problem)


def _hear_taker(owner: "borrowed.Owner", message: Message, _files: list[int]) -> None:
    if hear := owner.givings.get(number(message, "id")):
        hear(message)


lent.words.update(dict.fromkeys(("offer", "handle", "room", "over"), _hear_offer))
lent.on_end.append(_forget_link)
queue.jumps.append(is_offered)
borrowed.words.update(dict.fromkeys(("accept", "decline"), _hear_taker))


def forget_parent() -> None:
    """In a forked child: all of this is the parent's."""
    _offers.clear()
    _known.clear()
