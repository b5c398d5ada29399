"""Faults that are planted in ebbtide. The walk must find each of them, because a check that cannot fail checks nothing.

`python -m tests.walk.planted` prints the walk's message for each, as JSON.
"""

import os

os.environ.setdefault("EBBTIDE_DRIVER", os.environ.get("EBBTIDE_TEST_DRIVER", "sim"))

import ctypes
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from ebbtide import _core, saver
from ebbtide.saver.regions import region
from ebbtide.saver.state import hooks

from . import shrink

REGION = {"size": 70_000, "kind": "noise", "value": 5, "style": "with", "trouble": None, "actor": 0}


def _make(number: int, letter: str) -> shrink.Step:
    return "allocate_in_region", {"number": number, "policy": [f"walk0-{letter}", "ram", False, None, "own"], **REGION}


def _pause(letter: str, trouble: Any = None) -> shrink.Step:
    options = {"backup": "as allocated", "missing_ok": False, "trouble": trouble}
    return "pause", {"actor": 0, "tags": [f"walk0-{letter}"], **options}


STEPS: list[shrink.Step] = [
    _make(1, "a"),
    _make(2, "b"),
    ("watch", {"number": 3, "tag": "*"}),
    ("ask", {"actor": 1, "what": "stats"}),
    ("lend", {"number": 2, "partner": 4, "how": "dlpack"}),
    _pause("a"),
    (
        "look",
        {"number": 1, "view": 5, "actor": 0, "begin": 0, "end": 900, "step": 1, "writable": False, "trouble": None},
    ),
    ("ask", {"actor": 0, "what": "where"}),
    _pause("never"),
    (
        "resume",
        {"actor": 0, "tags": [], "order": None, "missing_ok": False, "retain": None, "timeout": None, "trouble": None},
    ),
    ("write", {"number": 1, "begin": 0, "end": 9, "through": "base", "kind": "noise", "value": 7}),
    ("free", {"number": 1, "actor": 1}),
]


def _forgets_a_byte() -> None:
    right = saver.resume

    def wrong(*tags: str, **options: Any) -> Any:
        report = right(*tags, **options)
        for info in _core.allocations("walk0-a"):
            torch.frombuffer((ctypes.c_uint8 * 1).from_address(info.address), dtype=torch.uint8).zero_()
        return report

    saver.resume = wrong  # type: ignore[assignment]


def _stays_away() -> None:
    saver.resume = lambda *tags, **options: saver.Report("resume")  # type: ignore[assignment]


def _leaves_a_lease() -> None:
    right, _open = region.Region.__exit__, _core.Frame()

    def wrong(self: Any, *error: Any) -> None:
        _open.open_lease(self.tag, "a frame that stays open")
        right(self, *error)

    region.Region.__exit__ = wrong  # type: ignore[method-assign,assignment]


def _forgets_hooks() -> None:
    right = hooks.calls
    hooks.calls = lambda event, tags: [] if event.startswith("after") else right(event, tags)


def _takes_what_is_unknown() -> None:
    right = saver.pause
    saver.pause = lambda *tags, **options: right(*tags, **{**options, "missing_ok": True})  # type: ignore[assignment]


def _keeps_a_tensor() -> None:
    right, kept = torch.empty, []

    def wrong(*size: Any, **options: Any) -> torch.Tensor:
        kept.append(right(*size, **options))
        return kept[-1]

    torch.empty = wrong  # type: ignore[assignment]


def _shows_zeros() -> None:
    right = saver.backup_of
    saver.backup_of = lambda *given: torch.zeros_like(right(*given))  # type: ignore[arg-type,assignment]


def _ignores_the_tag() -> None:
    region.Region.__enter__ = lambda self: self  # type: ignore[method-assign]
    region.Region.__exit__ = lambda self, *error: None  # type: ignore[method-assign,assignment]


def _says_that_nothing_was_copied() -> None:
    right = saver.explain
    saver.explain = lambda tag: dataclasses.replace(right(tag), copied=0, blocks=())  # type: ignore[assignment]


def _says_that_all_is_here() -> None:
    right = saver.where

    def wrong(tensor: torch.Tensor) -> Any:
        found = right(tensor)
        return dataclasses.replace(found, device_bytes=found.device_bytes + found.stored_bytes, stored_bytes=0)

    saver.where = wrong  # type: ignore[assignment]


PLANTED: dict[str, tuple[Callable[[], None], str]] = {
    "forgets a byte": (_forgets_a_byte, "bytes are wrong"),
    "stays away": (_stays_away, "it is away"),
    "leaves a lease": (_leaves_a_lease, "a region of"),
    "forgets hooks": (_forgets_hooks, "and no hook afterwards"),
    "takes what is unknown": (_takes_what_is_unknown, "should have been refused"),
    "keeps a tensor": (_keeps_a_tensor, "something is left"),
    "shows zeros": (_shows_zeros, "other bytes than those that were paused"),
    "says that nothing was copied": (_says_that_nothing_was_copied, "explain of"),
    "says that all is here": (_says_that_all_is_here, "where gave"),
    "ignores the tag": (_ignores_the_tag, "has the tag"),
}


def main() -> None:
    found = {}
    for name, (plant, _) in PLANTED.items():
        found[name] = shrink.outcome_of(STEPS, 60, plant)
    found[""] = shrink.outcome_of(STEPS, 60)
    short = shrink.shrink(STEPS, 60, say=lambda *words, **options: None, plant=_shows_zeros)
    found["shrunk"] = " ".join(name for name, _ in short)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
