"""What operations and queries give back: plain values with a readable `str`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from ebbtide import _core


@dataclass(frozen=True)
class Held:
    """Bytes that ebbtide holds on a device for a tag."""

    tag: str
    device: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """What a pause or a resume did. Sizes are bytes.

    Attributes:
        kind: "pause" or "resume".
        bytes: device bytes freed (pause) or claimed (resume).
        copied: bytes that crossed the bus.
        skipped: bytes with a backup that needed no copy.
        seconds: how long it took.
        by_tag, by_device: `bytes`, by tag and by device ordinal.
        left: what ebbtide still holds on devices after it, and whose it is.
    """

    kind: str
    bytes: int = 0
    copied: int = 0
    skipped: int = 0
    seconds: float = 0.0
    by_tag: dict[str, int] = field(default_factory=dict)
    by_device: dict[int, int] = field(default_factory=dict)
    left: tuple[Held, ...] = ()

    @classmethod
    def from_core(cls, report: "_core.Report") -> "Report":
        """The same, from the core's report."""
        by_tag: dict[str, int] = {}
        by_device: dict[int, int] = {}
        for row in report.rows:
            by_tag[row.tag] = by_tag.get(row.tag, 0) + row.bytes
            by_device[row.device] = by_device.get(row.device, 0) + row.bytes
        left = tuple(Held(row.tag, row.device, row.bytes) for row in report.left)
        return cls(report.kind, report.bytes, report.copied, report.skipped, report.seconds, by_tag, by_device, left)

    def __str__(self) -> str:
        verb = "freed" if self.kind == "pause" else "claimed"
        whose = ", ".join(f"{tag} {format_size(size)}" for tag, size in self.by_tag.items())
        lines = [
            f"{self.kind}: {verb} {format_size(self.bytes)} in {self.seconds:.3f} s"
            + (f" ({whose})" if whose else "")
            + f", {format_size(self.copied)} copied, {format_size(self.skipped)} skipped"
        ]
        if len(self.by_device) > 1:
            lines += [f"  device {device}: {format_size(size)}" for device, size in sorted(self.by_device.items())]
        if self.left:
            left = ", ".join(f"{held.tag} {format_size(held.bytes)} on device {held.device}" for held in self.left)
            lines.append(f"  still held: {left}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Adoption:
    """What `adopt` did. Sizes are bytes.

    Attributes:
        tag: where the tensors are now.
        bytes: bytes moved into the tag.
        storages: storages moved (tensors that share one move together).
        already: storages that were in the tag before.
        skipped: reason -> number of tensors that stay where they are.
        seconds: how long it took.
    """

    tag: str
    bytes: int = 0
    storages: int = 0
    already: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"adopt into {self.tag}: {format_size(self.bytes)} in {self.storages} storages, {self.seconds:.3f} s"
        if self.already:
            text += f", {self.already} already there"
        for reason, count in self.skipped.items():
            text += f"\n  skipped {count}: {reason}"
        return text


@dataclass(frozen=True)
class TagStatus:
    """The state of one tag. Sizes are bytes.

    Attributes:
        state: "resident", "paused", "partial" (an operation failed midway: pause or resume again finishes it) or
            "empty".
        lease_count: regions that are open on it now.
        allocation_count, size_bytes: its allocations (torch's segments, not tensors).
        resident_bytes, stored_bytes, dropped_bytes: where they are.
    """

    tag: str
    state: str
    lease_count: int
    allocation_count: int
    size_bytes: int
    resident_bytes: int
    stored_bytes: int
    dropped_bytes: int

    @classmethod
    def from_core(cls, info: "_core.TagInfo") -> "TagStatus":
        """The same, from the core's row."""
        return cls(*(getattr(info, name) for name in cls.__dataclass_fields__))


class TagTable(dict[str, TagStatus]):
    """Tag -> TagStatus; its `str` is a table."""

    @classmethod
    def of(cls, statuses: Iterable[TagStatus]) -> "TagTable":
        """The table of these."""
        return cls({status.tag: status for status in statuses})

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("tag", "state", "regions", "size", "resident", "stored", "dropped")]
        for status in self.values():
            sizes = (status.size_bytes, status.resident_bytes, status.stored_bytes, status.dropped_bytes)
            rows.append((status.tag, status.state, str(status.lease_count), *map(format_size, sizes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@dataclass(frozen=True)
class Event:
    """One thing that happened. Sizes are bytes.

    Attributes:
        kind: "pause", "resume", "pause_failed", "resume_failed" or "out_of_memory".
        unix_seconds, seconds: when it ended (seconds since 1970), and how long it took.
        tags: the tags it was about.
        bytes, copied: as in a Report.
        detail: the error's message, or "".
    """

    sequence: int
    unix_seconds: float
    seconds: float
    kind: str
    tags: str
    bytes: int
    copied: int
    detail: str

    @classmethod
    def from_core(cls, event: "_core.Event") -> "Event":
        """The same, from the core's row."""
        return cls(*(getattr(event, name) for name in cls.__dataclass_fields__))

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.unix_seconds).strftime("%H:%M:%S.%f")[:-3]
        text = f"{when} {self.kind} {self.tags}: {format_size(self.bytes)} in {self.seconds:.3f} s"
        return f"{text}: {self.detail}" if self.detail else text
