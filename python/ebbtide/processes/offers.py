"""What other processes may ask for: storages of this one, each behind a nonce. Of one thread at a time."""

import secrets
from collections.abc import Callable
from typing import NamedTuple

from ebbtide import _core
from ebbtide.errors import StateError

_FEW = 256


class Offered(NamedTuple):
    owner: str  # the name of this process's entry
    nonce: str
    generation: int


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

    def is_stale(self) -> bool:
        return _core.pause_count(self.tag) != self.generation


_offers: dict[str, _Offer] = {}
_nonces: dict[tuple[int, int, int], str] = {}  # of offers that hold nothing, by address, size and generation
_purge_at = _FEW


def check(address: int) -> None:
    """
    Raises: StateError: it lies in no exportable memory.
    """
    info = _core.find(address)
    if info is None:
        raise StateError("this tensor lies in no region: saver.region(tag, exportable=True)")
    if not info.is_exportable:
        raise StateError(
            f"a tensor in tag {info.tag!r} can't be shared with another process, as its region was not entered with "
            "exportable=True"
        )


def add(find: Callable[[], object | None], address: int, size_bytes: int, is_held: bool) -> tuple[str, int]:
    """The nonce and the generation of an offer; see `lent.offer`."""
    info = _core.find(address)
    if info is None:
        raise StateError("this tensor's memory is gone")
    generation = _core.pause_count(info.tag)
    key = (address, size_bytes, generation)
    known = _nonces.get(key, "")
    if not is_held and known in _offers and _offers[known].find() is not None:
        return known, generation
    _purge()
    nonce = secrets.token_hex(16)
    _offers[nonce] = _Offer(find, [find()] if is_held else [], address, size_bytes, info.tag, generation)
    if not is_held:
        _nonces[key] = nonce
    return nonce, generation


def _purge() -> None:
    global _purge_at
    if len(_offers) >= _purge_at:
        for nonce in [nonce for nonce, each in _offers.items() if each.find() is None or each.is_stale()]:
            del _offers[nonce]
        for key in [key for key, nonce in _nonces.items() if nonce not in _offers]:
            del _nonces[key]
        _purge_at = max(_FEW, 2 * len(_offers))


def find(nonce: str, generation: int) -> tuple[object, _Offer]:
    """
    Raises: StateError: it is stale.
    """
    found = _offers.get(nonce)
    storage = found.find() if found is not None else None
    if found is None or storage is None:
        raise StateError("this share is stale: its tensor is gone")
    if generation != found.generation or found.is_stale():
        raise StateError(f"this share is stale: tag {found.tag!r} was paused since. Share the tensor again")
    return storage, found


def forget_parent() -> None:
    """In a forked child."""
    _offers.clear()
    _nonces.clear()
