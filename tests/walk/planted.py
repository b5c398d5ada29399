"""Faults that are planted in ebbtide. The walk must find each of them, because a check that cannot fail checks nothing.

`python -m tests.walk.planted` makes CI's walks with each of them, and fails if they miss one.
"""

import os

os.environ.setdefault("EBBTIDE_DRIVER", os.environ.get("EBBTIDE_TEST_DRIVER", "sim"))

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from ebbtide import _core, saver
from ebbtide.saver.regions import region
from ebbtide.saver.state import hooks

from . import ci, machine


def _forgets_a_byte() -> None:
    right = saver.resume

    def wrong(*tags: str, **options: Any) -> Any:
        report = right(*tags, **options)
        for info in [info for info in _core.allocations() if info.tag.endswith("-a") and info.resident_bytes]:
            torch.frombuffer((ctypes.c_uint8 * 1).from_address(info.address), dtype=torch.uint8).zero_()
        return report

    saver.resume = wrong  # type: ignore[assignment]


def _stays_away() -> None:
    right = saver.resume

    def wrong(*tags: str, **options: Any) -> Any:
        return saver.Report("resume") if options.get("wait", True) else right(*tags, **options)

    saver.resume = wrong  # type: ignore[assignment]


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

    def wrong(*given: Any, **options: Any) -> Any:
        shown = right(*given, **options)
        return None if shown is None else torch.zeros_like(shown)

    saver.backup_of = wrong  # type: ignore[assignment]


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


PLANTED = (
    _forgets_a_byte,
    _stays_away,
    _leaves_a_lease,
    _forgets_hooks,
    _takes_what_is_unknown,
    _keeps_a_tensor,
    _shows_zeros,
    _ignores_the_tag,
    _says_that_nothing_was_copied,
    _says_that_all_is_here,
)


def found(plant: Callable[[], None]) -> str:
    """What the first of CI's walks to fail says with this fault, or ""."""
    return next(filter(None, (_found_by(share, plant) for share in ci.SHARES)), "")


def _found_by(share: ci.Share, plant: Callable[[], None]) -> str:
    """The walk runs in a child, which has the fault for itself."""
    reader, writer = os.pipe()
    child = ci.fork(share)
    if child == 0:
        machine.warm_up()
        plant()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(BaseException):
            share.walk(shrinks=False)
        os.write(writer, machine.Walk.failures[0].encode()[:4000] if machine.Walk.failures else b"")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def main() -> int:
    status = 0
    for plant in PLANTED:
        start, said = time.monotonic(), found(plant)
        print(f"{plant.__name__}: {time.monotonic() - start:.0f} s: {said[:160] or 'NOT FOUND'}", flush=True)
        status |= not said.startswith("Failure: ")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
