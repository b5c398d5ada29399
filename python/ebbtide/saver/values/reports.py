"""The results of operations and queries: plain values with a readable `str`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, TypeVar

from ebbtide import _core
from ebbtide.saver.values.arguments import backup_names
from ebbtide.saver.values.shown import Shown, html_table, not_looked_into, text_table
from ebbtide.sizes import format_size

VERBS = {"pause": "freed", "trim": "freed", "demote": "freed", "prepare": "made ready"}


@dataclass(frozen=True)
class Held(Shown):
    """Bytes that ebbtide holds on a device for a tag.

    For example:

        print(sum(held.bytes for held in saver.pause("weights").remaining))
    """

    tag: str
    device: int
    bytes: int


@dataclass(frozen=True)
class ReportRow(Shown):
    """The result of an operation for one tag on one device. The fields are those of a Report; sizes are bytes.

    For example:

        print(saver.pause("weights").rows[0].device)
    """

    tag: str
    device: int
    bytes: int = 0
    copied: int = 0
    skipped: int = 0
    clean: int = 0
    unused: int = 0
    constant: int = 0


_TOTALS = tuple(ReportRow.__dataclass_fields__)[2:]  # all but tag and device
Key = TypeVar("Key", str, int)
Value = TypeVar("Value")


class _Lazy(Generic[Value]):
    """A field of Report that is made from the core's report on first access, since it may have a row for every tag, and
    most callers do not look at it."""

    def __init__(self, make: "Callable[[_core.Report], Value]", make_empty: "Callable[[], Value]") -> None:
        self._make, self._make_empty = make, make_empty

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, report: "Report | None", owner: type) -> Value:
        if report is None:
            return None  # type: ignore[return-value] # the default
        found = report.__dict__[self._name]
        if isinstance(found, _core.Report):
            found = report.__dict__[self._name] = self._make(found)
        return found

    def __set__(self, report: "Report", value: "Value | _core.Report") -> None:
        report.__dict__[self._name] = self._make_empty() if value is None else value


def _sum(sizes: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    sums: dict[Key, int] = {}
    for key, size_bytes in sizes:
        sums[key] = sums.get(key, 0) + size_bytes
    return sums


_PLAIN = ("kind", *_TOTALS, "seconds", "note")  # the fields of Report in the core's `plain`


@dataclass(frozen=True)
class Report(Shown):
    """The result of an operation. Sizes are bytes.

        print(saver.pause("weights").copied)

    Attributes:
        kind: "pause", "resume", "prepare", "trim", "promote" or "demote".
        bytes: device bytes freed (pause, trim, demote) or claimed (resume, promote); bytes made ready for backups
            (prepare).
        copied: bytes that crossed the bus.
        skipped: bytes with a backup that needed no copy: the sum of clean, unused and constant.
        clean: bytes that the backup held already.
        unused: free blocks inside torch's segments, whose content is not needed.
        constant: blocks of one repeated value, stored as that value.
        seconds: the duration.
        by_tag, by_device: `bytes`, by tag and by device ordinal.
        note: why a promotion stopped before everything was on the device, or nothing was copied ahead; else "".
        rows: the same numbers for each tag and device that moved.
        remaining: the bytes that ebbtide still holds on devices afterwards, by tag and device. Empty after a trim that
            found nothing to free.
    """

    kind: str
    bytes: int = 0
    copied: int = 0
    skipped: int = 0
    clean: int = 0
    unused: int = 0
    constant: int = 0
    seconds: float = 0.0
    by_tag: _Lazy[dict[str, int]] = _Lazy(lambda report: _sum((row[0], row[2]) for row in report.rows), dict)
    by_device: _Lazy[dict[int, int]] = _Lazy(lambda report: _sum((row[1], row[2]) for row in report.rows), dict)
    note: str = ""
    rows: _Lazy[tuple[ReportRow, ...]] = _Lazy(lambda report: tuple(ReportRow(*row) for row in report.rows), tuple)
    remaining: _Lazy[tuple[Held, ...]] = _Lazy(lambda report: tuple(Held(*row) for row in report.remaining), tuple)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dict__}

    @classmethod
    def from_core(cls, report: "_core.Report") -> "Report":
        """Converts the core's report."""
        made = cls.__new__(cls)  # not by __init__, which sets each field of a frozen class by a call of its own
        plain = zip(_PLAIN, report.plain, strict=True)
        made.__dict__.update(plain, by_tag=report, by_device=report, rows=report, remaining=report)
        return made

    @classmethod
    def joined(cls, kind: str, reports: "Sequence[Report]", seconds: float) -> "Report":
        """One report of the steps of one operation."""
        rows: dict[tuple[str, int], ReportRow] = {}
        for row in (row for report in reports for row in report.rows):
            sum_of = rows.get((row.tag, row.device), ReportRow(row.tag, row.device))
            added = {name: getattr(sum_of, name) + getattr(row, name) for name in _TOTALS}
            rows[row.tag, row.device] = replace(sum_of, **added)
        totals = {name: sum(getattr(row, name) for row in rows.values()) for name in _TOTALS}
        return cls(
            kind,
            **totals,
            seconds=seconds,
            by_tag=_sum((row.tag, row.bytes) for row in rows.values()),
            by_device=_sum((row.device, row.bytes) for row in rows.values()),
            note=next((report.note for report in reports if report.note), ""),
            rows=tuple(rows.values()),
            remaining=reports[-1].remaining if reports else (),
        )

    def __str__(self) -> str:
        verb = VERBS.get(self.kind, "claimed")
        whose = ", ".join(f"{tag} {format_size(size)}" for tag, size in self.by_tag.items())
        lines = [
            f"{self.kind}: {verb} {format_size(self.bytes)} in {self.seconds:.3f} s"
            + (f" ({whose})" if whose else "")
            + (self._describe_bytes() if self._has_copies() else "")
        ]
        if len(self.by_device) > 1:
            lines += [f"  device {device}: {format_size(size)}" for device, size in sorted(self.by_device.items())]
        if self.remaining:
            remaining = ", ".join(
                f"{held.tag} {format_size(held.bytes)} on device {held.device}" for held in self.remaining
            )
            lines.append(f"  on devices now: {remaining}")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def _has_copies(self) -> bool:
        if self.kind == "prepare":
            return self.copied + self.skipped > 0
        return self.kind in ("pause", "resume", "promote", "demote")

    def _describe_bytes(self) -> str:
        reasons = {"clean": self.clean, "unused": self.unused, "constant": self.constant}
        why = ", ".join(f"{format_size(size)} {reason}" for reason, size in reasons.items() if size)
        text = f", {format_size(self.copied)} copied, {format_size(self.skipped)} skipped"
        return f"{text} ({why})" if why else text


@dataclass(frozen=True)
class Swap(Shown):
    """The result of a swap.

        print(saver.swap(pause="weights", resume="kv_cache").paused.bytes)

    Attributes:
        paused, resumed: the Reports of the two sides.
        seconds: the duration of both together.
    """

    paused: Report
    resumed: Report
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"swap in {self.seconds:.3f} s\n{self.paused}\n{self.resumed}"


@dataclass(frozen=True)
class Asked(Shown):
    """A request of another process, and what came of it.

        print([asked.tags for asked in saver.safe_point().done])

    Attributes:
        what: "pause", "resume" or "trim".
        tags: those that moved; bytes: what that freed or claimed on devices.
        asker: who asked, such as "train.py 4711".
        problem: why it failed; "" if it did not.
    """

    what: str
    tags: tuple[str, ...]
    asker: str
    bytes: int
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class SafePoint(Shown):
    """The result of `safe_point`.

        print(saver.safe_point().away)

    Attributes:
        done: the requests, in the order in which they came.
        away: tags of which something is away that a request has paused.
        seconds: what it took, with the wait.
    """

    done: tuple[Asked, ...] = ()
    away: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Adoption(Shown):
    """The result of `adopt`. Sizes are bytes.

        print(saver.adopt(model, tag="trainer").skipped)

    Attributes:
        tag: the tag that the tensors are in now.
        bytes: bytes moved into the tag.
        storages: storages moved (tensors that share one move together).
        already: storages that were in the tag before.
        skipped: maps a reason to the number of tensors that stay where they are.
        seconds: the duration.
        passed_by: objects in a container that may hold tensors and were not looked into: maps their path, such as
            "trainer" in `adopt(locals(), ...)`, to the name of its type. Adopt its parts.
    """

    tag: str
    bytes: int = 0
    storages: int = 0
    already: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    passed_by: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"adopt into {self.tag}: {format_size(self.bytes)} in {self.storages} storages, {self.seconds:.3f} s"
        if self.already:
            text += f", {self.already} already there"
        for reason, count in self.skipped.items():
            text += f"\n  skipped {count}: {reason}"
        if self.passed_by:
            text += f"\n  {not_looked_into(self.passed_by)}"
        return text


@dataclass(frozen=True)
class TagStatus(Shown):
    """The state of one tag. Sizes are bytes.

        print(saver.tags()["weights"].resident_bytes)

    Attributes:
        state: "resident", "paused", "partial" (an operation failed midway: pause or resume again finishes it) or
            "empty".
        lease_count: regions that are open on it now.
        allocation_count, size_bytes: its allocations (torch's segments, not tensors).
        resident_bytes, stored_bytes, dropped_bytes: how many of its bytes are in each place.
        trimmed_bytes: bytes of free segments that were trimmed; not part of dropped_bytes.
        retained_bytes: host memory and disk space of backups that are kept while their content is resident; on the
            device this counts blocks of one value as well, which take none.
        ahead_bytes: the part of that whose bytes the backup has, as of some earlier moment (by a resume that retained
            it, or `prepare` with copy=True): a pause copies only the blocks that changed since.
        host_bytes: the part of resident_bytes in host memory (spilled or demoted), which the device reads over the bus.
        paused_host_bytes: the part of host_bytes that a pause with a backup left there; it counts as paused.
        detached_bytes: whole in memory that a failed trim, promote or demote could not map again: away until a resume.
        kept_bytes: the part of resident_bytes that `saver.keep` keeps on the device.
        backups: the kinds of backup that hold its bytes, and of resident bytes those that its regions ask for: "ram",
            "pinned", "disk", or None for none.
    """

    tag: str
    state: str
    lease_count: int
    allocation_count: int
    size_bytes: int
    resident_bytes: int
    stored_bytes: int
    dropped_bytes: int
    trimmed_bytes: int = 0
    retained_bytes: int = 0
    host_bytes: int = 0
    paused_host_bytes: int = 0
    detached_bytes: int = 0
    ahead_bytes: int = 0
    kept_bytes: int = 0
    backups: tuple[str | None, ...] = ()

    @property
    def device_bytes(self) -> int:
        """The part of resident_bytes in the device's own memory."""
        return self.resident_bytes - self.host_bytes

    @classmethod
    def from_core(cls, info: "_core.TagInfo") -> "TagStatus":
        """Converts the core's row."""
        numbers = {name: getattr(info, name) for name in _STATUS_NUMBERS}
        return cls(**numbers, backups=backup_names(info.backups))


_STATUS_NUMBERS = tuple(name for name in TagStatus.__dataclass_fields__ if name != "backups")


class TagTable(Shown, dict[str, TagStatus]):
    """Maps a tag to its TagStatus; its `str` is a table.

    For example:

        print(saver.tags().to_json())
    """

    @classmethod
    def of(cls, statuses: Iterable[TagStatus]) -> "TagTable":
        """The table of these rows."""
        return cls({status.tag: status for status in statuses})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The fields of each status as plain dictionaries, by tag."""
        return {tag: status.to_dict() for tag, status in self.items()}

    def __str__(self) -> str:
        return "\n".join(text_table(self._rows()))

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        columns = ["size", "device", "stored", "dropped"]
        # Few programs have these: shown only where they are not zero.
        rare = ("host", "trimmed", "retained", "ahead", "detached", "kept")
        columns += [name for name in rare if any(getattr(status, f"{name}_bytes") for status in self.values())]
        rows: list[tuple[str, ...]] = [("tag", "state", "open", "backup", *columns)]
        for status in self.values():
            sizes = [format_size(getattr(status, f"{name}_bytes")) for name in columns]
            backup = " ".join(kind or "none" for kind in status.backups)
            rows.append((status.tag, status.state, str(status.lease_count), backup, *sizes))
        return rows


@dataclass(frozen=True)
class Event(Shown):
    """One event of the timeline. Sizes are bytes.

        print(saver.timeline[-1].kind)

    Attributes:
        kind: "pause", "resume", "swap", "prepare", "trim", "separate" (before a trim: of segments that shared a
            handle), "promote" or "demote", each also with "_failed" (then some bytes may have moved), or
            "out_of_memory".
        unix_seconds, seconds: when it ended (seconds since 1970), and its duration.
        tags: the tags concerned; of many, the first ones and the number of the others.
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

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.unix_seconds).strftime("%H:%M:%S.%f")[:-3]
        text = f"{when} {self.kind} {self.tags}: {format_size(self.bytes)} in {self.seconds:.3f} s"
        return f"{text}: {self.detail}" if self.detail else text
