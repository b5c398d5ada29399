"""What is drawn: the rooms of csrc evenly, the places of a room by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from .operators import Mutation, find_mutations

SUFFIXES = {".cpp", ".h"}
# The C interface is numbers and declarations, which the tests compile from the same file.
LEFT_OUT = frozenset({"csrc/api/ebbtide.h"})
SIMULATOR = "sim"


def find_rooms(tree: Path, with_simulator: bool) -> list[str]:
    rooms = sorted(path.name for path in (tree / "csrc").iterdir() if path.is_dir())
    return [room for room in rooms if with_simulator or room != SIMULATOR]


def collect(tree: Path, rooms: Sequence[str]) -> dict[str, list[Mutation]]:
    """Every mutation of these rooms."""
    found: dict[str, list[Mutation]] = {}
    for room in rooms:
        found[room] = []
        for path in sorted((tree / "csrc" / room).rglob("*")):
            name = path.relative_to(tree).as_posix()
            if path.suffix in SUFFIXES and name not in LEFT_OUT:
                found[room] += find_mutations(name, path.read_text())
    return found


class Sample:
    """Mutations in the order in which they are tried; one that does not count is replaced from its own room."""

    def __init__(self, mutations: dict[str, list[Mutation]], count: int, seed: int) -> None:
        drawing = random.Random(seed)
        self._waiting = {room: drawing.sample(places, len(places)) for room, places in mutations.items()}
        rooms = drawing.sample(sorted(mutations), len(mutations))
        self._order = [rooms[number % len(rooms)] for number in range(count)] if rooms else []

    def __iter__(self) -> Iterator[Mutation]:
        while self._order:
            room = self._order.pop(0)
            if self._waiting[room]:
                yield self._waiting[room].pop()

    def draw_again(self, mutation: Mutation) -> None:
        """This one was none: another of its room comes next."""
        self._order.insert(0, mutation.room)
