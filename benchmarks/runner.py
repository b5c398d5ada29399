"""Runs the parts of the chosen works and of the limits they need, each in processes of its own.

A part that fails loses nothing of the others. Parts that give one sample a process take turns, so that a machine that
slows down or speeds up meanwhile does so for all of them.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ebbtide import saver

from benchmarks import catalogue, isolation, provenance
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.rivals import RIVALS
from benchmarks.sizes import Sizes

Entries = dict[str, dict[str, Any]]
Group = tuple[str, Callable[[Sizes], list[Part]]]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find_part(name: str, sizes: Sizes) -> Part:
    """Raises KeyError for a name that neither a work nor a limit has."""
    makers = [*catalogue.LIMITS.values(), *catalogue.WORKS.values()]
    return {part.name: part for make in makers for part in make(sizes)}[name]


def measure_part(name: str, sizes: Sizes) -> dict[str, Any]:
    """Runs in the fresh process; parts are passed by name, since what measures them may not travel."""
    return find_part(name, sizes).measure(sizes).to_json()


def collect_origin(arguments: argparse.Namespace) -> dict[str, Any]:
    """The result's provenance; to be run in a fresh process, since it uses the driver."""
    assert saver.device  # decides which driver this is
    return {"origin": provenance.collect(arguments)}


def choose(works: Iterable[str]) -> list[Group]:
    """The chosen works, what they are compared with, and before them the limits that these need.

    Raises:
        ValueError: a name that is none of the works.
    """
    wanted = set(works)
    if unknown := wanted - catalogue.WORKS.keys():
        raise ValueError(f"no such work: {', '.join(sorted(unknown))}; there are: {', '.join(catalogue.WORKS)}")
    for name in list(wanted):
        wanted.update(catalogue.COMPARED_WITH.get(name, ()))
    needed = {"link", *(limit for name in wanted for limit in catalogue.NEEDS.get(name, ()))}
    limits: list[Group] = [(name, make) for name, make in catalogue.LIMITS.items() if name in needed]
    return limits + [(name, make) for name, make in catalogue.WORKS.items() if name in wanted]


class Runner:
    """Keeps the figures of every part by its name.

    Args:
        rivals: False leaves the parts of rivals out.
        timeout: seconds that one process may take.
    """

    def __init__(self, sizes: Sizes, rivals: bool = True, timeout: float = 300) -> None:
        self.entries: Entries = {}
        self._sizes = sizes
        self._rivals = rivals
        self._timeout = timeout

    def run(self, groups: Iterable[Group]) -> Iterator[str]:
        """Gives the name of each group once its parts are done."""
        for name, make in groups:
            parts = [part for part in make(self._sizes) if self._rivals or not is_of_rival(part.name)]
            for part in parts:
                if not part.is_first_only:
                    self._take(part)
            for _ in range(self._sizes.samples):
                for part in parts:
                    if part.is_first_only and self.entries.get(part.name, {"status": "ok"})["status"] == "ok":
                        self._take(part)
            yield name

    def _take(self, part: Part) -> None:
        entry = isolation.run(partial(measure_part, part.name, self._sizes), part.environment, self._timeout)
        before = self.entries.get(part.name)
        entry["processes"] = 1 + (before["processes"] if before else 0)
        if before and entry["status"] == "ok":
            entry = merge(before, entry)
        elif before:  # what was measured so far stays, and the failure is said
            entry = {**before, **entry}
        self.entries[part.name] = entry
        reason = entry.get("reason") or "; ".join(entry.get("faults", ()))
        say(f"{part.name}: {entry['status']}{' (' + reason + ')' if reason else ''}")


def is_of_rival(name: str) -> bool:
    """Whether the part of this name measures a rival."""
    return any(word in RIVALS for word in name.split("."))


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two processes that measured the same."""
    fields = Measured.__dataclass_fields__
    merged = Measured(**{name: one[name] for name in fields})
    merged.merge(Measured(**{name: other[name] for name in fields}))
    return {**one, **other, **merged.to_json()}


def find_failures(entries: Entries) -> list[str]:
    """A sentence for each part that failed or found something wrong; rivals' own faults are theirs."""
    failures = []
    for name, entry in entries.items():
        if entry["status"] == "failed":
            failures.append(f"{name}: {entry['reason']}")
        failures += [f"{name}: {fault}" for fault in dict.fromkeys(entry.get("faults", ()))]
        if "exit_status" in entry and not is_of_rival(name):
            failures.append(f"{name}: its process ended with status {entry['exit_status']} after its result")
    return failures
