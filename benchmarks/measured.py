"""A part of the benchmark with its results, as plain values that JSON takes, and the watch that times it."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.sizes import Sizes


@dataclass
class Measured:
    """Raw figures: nothing is averaged here.

    Attributes:
        bytes: the bytes that one operation moves.
        seconds: metric ("pause", "resume" and so on) -> one figure each time.
        cpu_seconds: the same for the processor time of all threads.
        facts: numbers and words that explain the figures, and lists with an element for each figure.
        faults: wrong bytes, wrong addresses, memory that was not free.
    """

    bytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, metric: str, seconds: float, cpu_seconds: float | None = None) -> None:
        self.seconds.setdefault(metric, []).append(seconds)
        if cpu_seconds is not None:
            self.cpu_seconds.setdefault(metric, []).append(cpu_seconds)

    def merge(self, other: "Measured") -> None:
        """Takes in the figures of another process that measured the same."""
        self.bytes = other.bytes
        for mine, others in ((self.seconds, other.seconds), (self.cpu_seconds, other.cpu_seconds)):
            for metric, values in others.items():
                mine.setdefault(metric, []).extend(values)
        for name, fact in other.facts.items():
            mine_too = self.facts.get(name) if isinstance(fact, list) else None
            self.facts[name] = [*mine_too, *fact] if mine_too else fact
        self.faults += other.faults

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Part:
    """One entry of a workload's or a limit's `parts`.

    Attributes:
        name: "WORKLOAD.WHO" or "limits.WHAT": the key of its figures in the JSON.
        measure: what runs in the fresh process.
        is_first_only: a process gives one sample, since only its first operation counts; so there are as many processes
            as samples are asked for.
        processes: how many those are at most.
        environment: variables that the process gets.
        least_seconds: it is not started where the budget has less left than this.
    """

    name: str
    measure: Callable[[Sizes], Measured]
    is_first_only: bool = False
    processes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    least_seconds: float = 0


def turns(least: int, most: int, patience_seconds: float) -> Iterator[int]:
    """Numbers turns: `least` of them, then more up to `most` until the patience is over."""
    start = time.perf_counter()
    turn = 0
    while turn < least or (turn < most and time.perf_counter() - start < patience_seconds):
        yield turn
        turn += 1


class SkippedError(Exception):
    """Why a part can't run here: no failure."""


class Stopwatch:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._cpu_start = time.process_time()
        self._start = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Seconds by the clock, and seconds of processor time of all threads of this process."""
        seconds = time.perf_counter() - self._start
        return seconds, time.process_time() - self._cpu_start
