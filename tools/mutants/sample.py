"""The draw: the rooms of csrc evenly, the places of a room by a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from .operators import Mutation, find_mutations

SUFFIXES = {".cpp", ".h"}
# The C interface is numbers and declarations, which the tests compile from the same file.
LEFT_OUT = frozenset(
    {"csrc/api/ebbtide.h", *(f"csrc/api/ebbtide_{name}.h" for name in ("limits", "lms", "queries", "threads"))}
)
SIMULATOR = "sim"
# A header that more sources than this are compiled with is left out of a sample: its mutants would take longer than all
# others together.
MOST_USERS = 30
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def find_rooms(tree: Path, with_simulator: bool) -> list[str]:
    rooms = sorted(path.name for path in (tree / "csrc").iterdir() if path.is_dir())
    return [room for room in rooms if with_simulator or room != SIMULATOR]


def count_users(tree: Path) -> dict[str, int]:
    """How many sources are compiled with each header of csrc, directly or not."""
    included = {}
    for path in [*(tree / "csrc").rglob("*"), *(tree / "tests" / "cpp").glob("*")]:
        if path.suffix in SUFFIXES:
            names = INCLUDE.findall(path.read_text())
            included[path] = [tree / folder / name for name in names for folder in ("csrc", "tests/cpp")]
    users: dict[str, int] = {}
    for source in included:
        reached: set[Path] = set()
        waiting = [source] if source.suffix == ".cpp" else []
        while waiting:
            for header in included.get(waiting.pop(), []):
                if header not in reached and header in included:
                    reached.add(header)
                    waiting.append(header)
        for header in reached:
            name = header.relative_to(tree).as_posix()
            users[name] = users.get(name, 0) + 1
    return users


def collect(tree: Path, rooms: Sequence[str], most_users: int = MOST_USERS) -> dict[str, list[Mutation]]:
    """Every mutation of these rooms, but for headers of many users."""
    users = count_users(tree)
    found: dict[str, list[Mutation]] = {}
    for room in rooms:
        found[room] = []
        for path in sorted((tree / "csrc" / room).rglob("*")):
            name = path.relative_to(tree).as_posix()
            if path.suffix in SUFFIXES and name not in LEFT_OUT and users.get(name, 0) <= most_users:
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
