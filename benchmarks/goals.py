"""The limits that a figure is compared with. Pure: raw figures in, seconds and ratios out.

L, D and T are those of the same run: L copies of pinned memory, D bare driver calls at the best handle size, T
torch_memory_saver.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Entries = dict[str, dict[str, Any]]
Direction = Literal["to_host", "to_device"]


def median_of(
    entries: Entries, part: str, metric: str, statistic: Callable[[list[float]], float] = statistics.median
) -> float | None:
    """None where it was not measured, or where the measurement was wrong."""
    entry = entries.get(part, {})
    values = entry.get("seconds", {}).get(metric)
    return statistic(values) if values and entry["status"] == "ok" and not entry["faults"] else None


@dataclass(frozen=True)
class Limit:
    """A time to be compared with. `seconds` takes all entries and the bytes of the row; None: not measured."""

    label: str
    seconds: Callable[[Entries, int], float | None]


@dataclass(frozen=True)
class Goal:
    """`relation` ">=": so many times as fast as the limit at least. "<=": so many times its time at most."""

    relation: Literal[">=", "<="]
    target: float | None
    limit: Limit
    is_stretch: bool = False

    def judge(self, entries: Entries, size_bytes: int, seconds: float) -> dict[str, Any]:
        """Plain values; `ratio` and `reached` are None where there is nothing to compare with."""
        limit_seconds = self.limit.seconds(entries, size_bytes)
        ratio = reached = None
        if limit_seconds:
            ratio = limit_seconds / seconds if self.relation == ">=" else seconds / limit_seconds
            if self.target is not None:
                reached = ratio >= self.target if self.relation == ">=" else ratio <= self.target
        return {
            "against": self.limit.label,
            "limit_seconds": limit_seconds,
            "ratio": ratio,
            "relation": self.relation,
            "target": self.target,
            "is_stretch": self.is_stretch,
            "reached": reached,
        }


def at_least(target: float, limit: Limit) -> Goal:
    return Goal(">=", target, limit)


def stretch(target: float, limit: Limit) -> Goal:
    return Goal(">=", target, limit, is_stretch=True)


def at_most(target: float, limit: Limit) -> Goal:
    return Goal("<=", target, limit)


def shown(limit: Limit) -> Goal:
    """For comparison only."""
    return Goal(">=", None, limit)


def median(part: str, metric: str, label: str) -> Limit:
    """The median of another figure."""
    return Limit(label, lambda entries, _: median_of(entries, part, metric))


def least(part: str, metric: str, label: str) -> Limit:
    """The least of another figure: for a cost to which noise only adds."""
    return Limit(label, lambda entries, _: median_of(entries, part, metric, min))


def scaled(part: str, metric: str, label: str) -> Limit:
    """The time of the row's bytes at the rate of another figure."""

    def seconds(entries: Entries, size_bytes: int) -> float | None:
        found = median_of(entries, part, metric)
        return None if found is None else found * size_bytes / entries[part]["bytes"]

    return Limit(label, seconds)


def link(direction: Direction) -> Limit:
    return scaled("limits.link", direction, "L")


def rate(gigabytes_per_second: float) -> Limit:
    """The row's bytes at a fixed rate: for targets in GB/s, whatever this machine's limit is."""
    return Limit(f"{gigabytes_per_second:g} GB/s", lambda _, size_bytes: size_bytes / gigabytes_per_second / 1e9)


def fixed(seconds: float) -> Limit:
    return Limit(f"{1000 * seconds:g} ms", lambda *_: seconds)


def scaled_to_fact(fact: str, of: str, part: str, metric: str, label: str) -> Limit:
    """As `scaled`, for as many bytes as a fact of the part `of` says."""

    def seconds(entries: Entries, _: int) -> float | None:
        size_bytes = entries.get(of, {}).get("facts", {}).get(fact)
        return None if size_bytes is None else scaled(part, metric, label).seconds(entries, size_bytes)

    return Limit(label, seconds)


def driver_calls(part: str, kind: Literal["claim", "give"], factor: float = 1) -> Limit:
    """The same bytes by bare driver calls in the same part, at the handle size that is best for them."""

    def seconds(entries: Entries, _: int) -> float | None:
        metrics = [metric for metric in entries.get(part, {}).get("seconds", ()) if metric.startswith(f"{kind} ")]
        medians = [found for metric in metrics if (found := median_of(entries, part, metric)) is not None]
        return factor * min(medians) if medians else None

    return Limit(f"{factor:g} D" if factor != 1 else "D", seconds)


def of_all(label: str, combine: Callable[[list[float]], float], *limits: Limit) -> Limit:
    """Several limits in one: their sum, or the largest of them."""

    def seconds(entries: Entries, size_bytes: int) -> float | None:
        found = [limit.seconds(entries, size_bytes) for limit in limits]
        known = [value for value in found if value is not None]
        return combine(known) if len(known) == len(found) else None

    return Limit(label, seconds)
