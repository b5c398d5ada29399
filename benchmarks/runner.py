"""Runs the parts of the chosen workloads and of the limits they need, each in processes of its own.

A part that fails loses nothing of the others. Parts that give one sample a process take turns, so that a machine that
slows down or speeds up meanwhile does so for all of them.
"""

import fnmatch
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ebbtide import saver

from benchmarks import catalogue, isolation, provenance
from benchmarks.baselines import BASELINES
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes

Entries = dict[str, dict[str, Any]]
Group = tuple[str, Callable[[Sizes], list[Part]]]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find_part(name: str, sizes: Sizes) -> Part:
    """Raises KeyError for a name that neither a workload nor a limit has."""
    makers = [*catalogue.LIMITS.values(), *catalogue.WORKLOADS.values()]
    return {part.name: part for make in makers for part in make(sizes)}[name]


def measure_part(name: str, sizes: Sizes) -> dict[str, Any]:
    """Runs in the fresh process; parts are passed by name, since what measures them may not travel."""
    return find_part(name, sizes).measure(sizes).to_json()


def collect_origin(arguments: dict[str, Any], revision: str) -> dict[str, Any]:
    """The result's provenance; to be run in a fresh process, since it uses the driver."""
    assert saver.device  # decides which driver this is
    return {"origin": provenance.collect(arguments, revision)}


def choose(workloads: Iterable[str]) -> list[Group]:
    """The chosen workloads, their rivals, and before each the limits that it needs.

    Raises:
        ValueError: a name that is none of the workloads.
    """
    wanted = set(workloads)
    if unknown := wanted - catalogue.WORKLOADS.keys():
        raise ValueError(f"no such workload: {', '.join(sorted(unknown))}; there are: {', '.join(catalogue.WORKLOADS)}")
    for name in list(wanted):
        wanted.update(catalogue.COMPARED_WITH.get(name, ()))
    groups: dict[str, Group] = {}
    for workload in (name for name in catalogue.WORKLOADS if name in wanted):
        for limit in ("link", *catalogue.NEEDS.get(workload, ())):
            groups.setdefault(limit, (limit, catalogue.LIMITS[limit]))
        groups[workload] = (workload, catalogue.WORKLOADS[workload])
    return list(groups.values())


def only_parts(groups: list[Group], patterns: list[str]) -> list[Group]:
    """The same groups with the parts that one of these shell patterns names, and the limits.

    Raises:
        ValueError: a pattern names none of their parts.
    """
    names = [part.name for _, make in groups for part in make(Sizes())]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"no such part: {pattern}; there are: {', '.join(names)}")

    def is_meant(part: Part) -> bool:
        return part.name.startswith("limits.") or any(fnmatch.fnmatch(part.name, pattern) for pattern in patterns)

    def parts(sizes: Sizes, make: Callable[[Sizes], list[Part]]) -> list[Part]:
        return [part for part in make(sizes) if is_meant(part)]

    return [(name, partial(parts, make=make)) for name, make in groups]


class Runner:
    """Keeps the figures of every part by its name.

    Args:
        groups: what to measure, in this order.
        baselines: False leaves the parts of baselines out.
        timeout: seconds that one process may take.
        budget: seconds after which no process runs any more; None: no end.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        sizes: Sizes,
        baselines: bool = True,
        timeout: float = 300,
        budget: float | None = None,
    ) -> None:
        self.entries: Entries = {}
        made = [make(sizes) for _, make in groups]
        self._groups = [[part for part in parts if baselines or not is_of_baseline(part.name)] for parts in made]
        self._sizes = sizes
        self._timeout = timeout
        self._end = math.inf if budget is None else time.monotonic() + budget

    def run(self) -> Iterator[str]:
        """Gives the name of each part once one of its processes is done. What comes too late is left out."""
        for part in itertools.chain(*(in_turns(parts, self._sizes.samples) for parts in self._groups)):
            if self._end - time.monotonic() <= part.least_seconds:
                continue  # a later one may need less
            if self.entries.get(part.name, {"status": "ok"})["status"] == "ok":
                self._take(part)
                yield part.name
        self.leave_out("out of time")

    def leave_out(self, why: str) -> None:
        """Says of every part without figures that it was not measured, and why."""
        for part in itertools.chain(*self._groups):
            self.entries.setdefault(part.name, {"status": "left out", "reason": f"not measured: {why}"})

    def _take(self, part: Part) -> None:
        left = self._end - time.monotonic()
        start = time.monotonic()
        entry = isolation.run(partial(measure_part, part.name, self._sizes), part.environment, min(self._timeout, left))
        seconds = time.monotonic() - start
        if entry["status"] == "failed" and time.monotonic() >= self._end:
            say(f"{part.name}: cut off, out of time ({seconds:.1f} s)")
            return  # leave_out follows
        before = self.entries.get(part.name)
        entry["processes"] = 1 + (before["processes"] if before else 0)
        if before and entry["status"] == "ok":
            entry = merge(before, entry)
        elif before:  # earlier measurements stay, and the failure is reported
            entry = {**before, **entry}
        self.entries[part.name] = entry
        entry["process_seconds"] = seconds + (before["process_seconds"] if before else 0)
        say(f"{part.name}: {describe(entry)} [{seconds:.1f} s]")


def in_turns(parts: Iterable[Part], samples: int) -> Iterator[Part]:
    """First those that one process measures, then, again and again, those that need several."""
    parts = list(parts)
    yield from (part for part in parts if not part.is_first_only)
    for turn in range(samples):
        yield from (part for part in parts if part.is_first_only and turn < (part.processes or samples))


def describe(entry: dict[str, Any]) -> str:
    """Its status, and of each metric the median, the rate and how often it was measured."""
    reason = entry.get("reason") or "; ".join(dict.fromkeys(entry.get("faults", ())))
    words = [f"{entry['status']}{' (' + reason + ')' if reason else ''}"]
    for metric, values in entry.get("seconds", {}).items():
        median = statistics.median(values)
        rate = f" = {entry['bytes'] / median / 1e9:.3g} GB/s" if entry["bytes"] else ""
        words.append(f"{metric} {median:.4g} s{rate} x{len(values)}")
    return "; ".join(words)


def is_of_baseline(name: str) -> bool:
    """Whether the part of this name measures a baseline."""
    return any(word in BASELINES for word in name.split("."))


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two processes that measured the same."""
    fields = Measured.__dataclass_fields__
    merged = Measured(**{name: one[name] for name in fields})
    merged.merge(Measured(**{name: other[name] for name in fields}))
    return {**one, **other, **merged.to_json()}


def find_failures(entries: Entries) -> list[str]:
    """A sentence for each part that failed or found something wrong; baselines' own faults are theirs."""
    failures = []
    for name, entry in entries.items():
        if entry["status"] == "failed":
            failures.append(f"{name}: {entry['reason']}")
        failures += [f"{name}: {fault}" for fault in dict.fromkeys(entry.get("faults", ()))]
        if "exit_status" in entry and not is_of_baseline(name):
            failures.append(f"{name}: its process ended with status {entry['exit_status']} after its result")
    return failures
