"""Perturbations of an operation: the k-th driver call fails, Ctrl-C arrives, or a hook raises.

Ctrl-C is exact: a trace function counts the instructions of ebbtide's own Python code and makes the signal pending at
the k-th one. Python then treats it as a real signal: it runs the handler at the next instruction that checks for
signals (the end of a call, the start of a function, a jump back). So nothing is interrupted that a real Ctrl-C could
not interrupt.
"""

import _thread
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ebbtide
from ebbtide import saver

from .device import Simulator

_PACKAGE = str(Path(ebbtide.__file__).parent) + "/"

DRIVER_CODES = (1, 2, 999)  # invalid value, out of memory, unknown
DRIVER_FUNCTIONS = (
    None,
    *("cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemRelease", "cuMemcpyAsync", "cuEventQuery"),
    *("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord", "cuStreamSynchronize"),
    *("cuMemAddressReserve", "cuMemHostAlloc", "cuCtxSynchronize", "cuMemsetD8Async", "cuMemHostRegister_v2"),
)


class HookFailed(Exception):  # noqa: N818
    """The error that the walk's hooks raise."""


@dataclass
class Trouble:
    """The perturbation of one operation. `kind` is "none", "fault", "interrupt" or "hook". `is_before`: the hook runs
    before the operation."""

    kind: str = "none"
    is_before: bool = False
    has_fired: bool = False


class _Trip(dict):
    """`trip[SIGINT]` makes the signal pending. It is not a call, because Python checks for signals at the end of a
    call."""

    __missing__ = staticmethod(_thread.interrupt_main)


class _Interrupt:
    def __init__(self, instruction: int, trouble: Trouble) -> None:
        self._left = instruction
        self._trouble = trouble
        self._trip = _Trip()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE) or self._trouble.has_fired:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._count

    def _count(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "opcode":
            return self._count
        self._left -= 1
        if self._left > 0 or self._trouble.has_fired:
            return self._count
        self._trouble.has_fired = True
        walking: FrameType | None = frame
        while walking is not None:
            walking.f_trace = None
            walking = walking.f_back
        sys.settrace(None)
        self._trip[signal.SIGINT]
        return None


@contextlib.contextmanager
def _interrupted(instruction: int) -> Iterator[Trouble]:
    trouble = Trouble("interrupt")
    interrupt = _Interrupt(instruction, trouble)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(interrupt.trace)
    try:
        yield trouble
    finally:
        try:
            sys.settrace(None)
        except KeyboardInterrupt:  # the signal was pending until now, so nothing was interrupted
            trouble.has_fired = False
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _failing(function: str | None, k: int, code: int, times: int) -> Iterator[Trouble]:
    simulator = Simulator()
    simulator.fail(function, k, code, times)
    try:
        yield Trouble("fault")
    finally:
        simulator.clear_failures()


@contextlib.contextmanager
def _hooked(event: str, tag: str) -> Iterator[Trouble]:
    trouble = Trouble("hook", event.startswith("before"))

    def fail(_: str) -> None:
        trouble.has_fired = True
        raise HookFailed(event)

    remove = saver.on(event, tag, fail)
    try:
        yield trouble
    finally:
        remove()


@contextlib.contextmanager
def _nothing() -> Iterator[Trouble]:
    yield Trouble()


def befall(what: list[Any] | None) -> "contextlib.AbstractContextManager[Trouble]":
    """A context manager for the perturbation `what`, which `draw_trouble` has drawn."""
    if what is None:
        return _nothing()
    makers = {"fault": _failing, "interrupt": _interrupted, "hook": _hooked}
    return makers[what[0]](*what[1:])
