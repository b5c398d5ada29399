"""What one process tells the others: a small JSON file."""

import json
from dataclasses import asdict, dataclass, field

VERSION = 2
LONGEST_TEXT = 1 << 20  # bytes of an entry; a longer one is none


@dataclass(frozen=True)
class Wait:
    """A call that waits for room."""

    device: str  # the UUID, in hexadecimal digits
    wanted_bytes: int
    tags: list[str]
    since: int  # nanoseconds of the clock that all processes of a machine share, and that is never set
    is_alone: bool = False  # no other thread of its process can make room meanwhile


@dataclass(frozen=True)
class TagHolding:
    device: str
    tag: str
    resident_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Entry:
    """A process, by what it says of itself."""

    name: str  # of the file, less its ending: the PID and eight random digits
    pid: int  # as the process sees it, which another container may not
    program: str
    told_at: int = 0  # by the clock of `Wait.since`
    tags: list[TagHolding] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    gives_up: list[str] = field(default_factory=list)  # tags that it pauses if another's resume has no room
    safe_point_at: int = 0  # of the last one, by the same clock; 0: there was none

    def held_bytes(self, device: str) -> int:
        return sum(holding.resident_bytes for holding in self.tags if holding.device == device)

    def offered_bytes(self, device: str) -> int:
        """What it would give up there."""
        return sum(each.resident_bytes for each in self.tags if each.device == device and each.tag in self.gives_up)

    def to_text(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})


def read_entry(name: str, text: bytes) -> Entry | None:
    """None where the text is no entry, or another version's."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.pop("version") != VERSION or found.pop("name") != name:
            return None
        tags = [TagHolding(**each) for each in found.pop("tags")]
        waits = [Wait(**each) for each in found.pop("waits")]
        entry = Entry(name=name, tags=tags, waits=waits, **found)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return entry if _has_right_types(entry) else None


def _has_right_types(entry: Entry) -> bool:
    if not isinstance(entry.gives_up, list):
        return False
    texts: list[object] = [entry.program, *entry.gives_up]
    numbers: list[object] = [entry.pid, entry.told_at, entry.safe_point_at]
    for holding in entry.tags:
        texts += [holding.device, holding.tag]
        numbers += [holding.resident_bytes, holding.stored_bytes]
    for wait in entry.waits:
        texts += [wait.device, *wait.tags]
        numbers += [wait.wanted_bytes, wait.since]
        if not isinstance(wait.is_alone, bool):
            return False
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers
    )
