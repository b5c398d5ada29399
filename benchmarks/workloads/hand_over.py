"""Two processes that need the same device memory in turns: `saver.hand_over` from one to the other, near the limit of
the device, against a pause there and then a resume here, and against the bare calls.

40 GiB whose content is dropped: `no_backup` with clear_handed=False in both processes, `cleared` without. 15 GiB that
leave for the host while 15 others come from there: `ram` and `pinned`.
"""

import os
import time
from collections.abc import Sequence
from functools import partial

import torch
from ebbtide import saver

from benchmarks import device, peer
from benchmarks import tensors as kept
from benchmarks.keepers import Ebbtide
from benchmarks.limits.driver_calls import BareCalls
from benchmarks.measured import Measured, Part, Stopwatch, turns
from benchmarks.peer import Peer
from benchmarks.sizes import MIB, Sizes
from benchmarks.tensors import Checker, Shape, Sums

WARM_UP = 2  # turns: the first time that a tag leaves is not like the others
QUEUE_SECONDS = 0.05  # until the other process's resume waits for the memory
PATIENCE_SECONDS = 60

_ballast: list[torch.Tensor] = []


def fill_up(spare_bytes: int) -> None:
    """Leaves so many bytes of the device."""
    device.empty_cache()
    size_bytes = (device.free_bytes() - spare_bytes) // (2 * MIB) * 2 * MIB
    with saver.region("ballast", backup=None):
        _ballast.append(torch.empty(size_bytes, dtype=torch.uint8, device=saver.device))
    device.synchronize()


# --- one of the two, in either process --------------------------------------------------------------------------------


class Side:
    """Tensors of one process, which are on the device or away."""

    def __init__(self, shapes: Sequence[Shape], backup: str | None) -> None:
        self._keeper = Ebbtide("mine", backup=backup, exportable=True, retain=backup == "ram")
        self._keeper.make(shapes)
        kept.fill(self._keeper.tensors)
        self._checker = Checker() if backup else None
        self._sums: list[Sums] = []

    def leave(self) -> None:
        """Changes every word. To be called before each move away."""
        kept.change(self._keeper.tensors)
        if self._checker is not None:
            self._sums = self._checker.sums(self._keeper.tensors)
        device.synchronize()

    def is_right(self) -> bool:
        return self._checker is None or self._checker.sums(self._keeper.tensors) == self._sums


_sides: list[Side] = []  # the peer's


def make_side(shapes: Sequence[Shape], backup: str | None) -> None:
    _sides.append(Side(shapes, backup))
    _sides[0].leave()
    saver.pause("mine")


def come() -> float:
    """When it was there."""
    saver.resume("mine", timeout=PATIENCE_SECONDS)
    device.synchronize()
    return time.perf_counter()


def is_right() -> bool:
    return _sides[0].is_right()


def prepare_to_leave() -> None:
    _sides[0].leave()


def go(to: int | None) -> None:
    """Hands its memory over, or to nobody."""
    if to is None:
        saver.pause("mine")
    else:
        saver.hand_over(pause="mine", to=to, timeout=PATIENCE_SECONDS)


# --- what is measured -------------------------------------------------------------------------------------------------


class TwoSides:
    """This process's tensors and the peer's, of which one are on the device."""

    def __init__(self, sizes: Sizes, shapes: Sequence[Shape], backup: str | None) -> None:
        self.bytes = kept.size_of(shapes)
        self._rest_seconds = sizes.rest_seconds
        self._other = Peer()
        self._other.ask(make_side, shapes, backup)
        self._mine = Side(shapes, backup)
        fill_up(self.bytes // 8)
        self._bare = BareCalls(self.bytes, sizes)

    def hand_over_and_back(self, measured: Measured) -> None:
        """Metric "hand_over", from this process's call until the other one has its memory."""
        self._mine.leave()
        self._other.start(come)
        time.sleep(self._rest_seconds + QUEUE_SECONDS)
        start = time.perf_counter()
        go(self._other.pid)
        measured.add("hand_over", self._other.answer() - start)
        self._check_other(measured)
        self._other.ask(prepare_to_leave)
        self._other.start(go, os.getpid())
        come()
        self._other.answer()
        self._check_mine(measured)

    def pause_then_resume(self, measured: Measured) -> None:
        """Metric "pause_then_resume": the other one is told once this one's memory is away."""
        self._mine.leave()
        time.sleep(self._rest_seconds)
        watch = Stopwatch()
        go(None)
        paused_seconds = watch.stop()[0]
        self._bare.take_turn(measured)
        time.sleep(self._rest_seconds)
        start = time.perf_counter()
        measured.add("pause_then_resume", paused_seconds + self._other.ask(come) - start)
        self._check_other(measured)
        self._other.ask(prepare_to_leave)
        self._other.ask(go, None)
        come()
        self._check_mine(measured)

    def stop(self) -> None:
        self._other.stop()

    def _check_other(self, measured: Measured) -> None:
        if not self._other.ask(is_right):
            measured.faults.append("the other process's bytes changed")

    def _check_mine(self, measured: Measured) -> None:
        if not self._mine.is_right():
            measured.faults.append("this process's bytes changed")


def measure_sides(sizes: Sizes, shapes: Sequence[Shape], backup: str | None) -> Measured:
    sides = TwoSides(sizes, shapes, backup)
    ignored = Measured()
    for _ in range(WARM_UP):
        sides.pause_then_resume(ignored)
        sides.hand_over_and_back(ignored)
    measured = Measured(bytes=sides.bytes, faults=ignored.faults)
    for _ in turns(2 * sizes.samples, 4 * sizes.samples, sizes.patience_seconds):
        sides.pause_then_resume(measured)
        sides.hand_over_and_back(measured)
    sides.stop()
    return measured


def measure_no_backup(sizes: Sizes) -> Measured:
    return measure_sides(sizes, kept.equal_shapes(sizes.no_backup_tensors, sizes.no_backup_tensor_bytes), None)


def measure_both_ways(sizes: Sizes, backup: str) -> Measured:
    return measure_sides(sizes, kept.llama_shapes(sizes.scale), backup)


def parts(_: Sizes) -> list[Part]:
    variables = peer.environment()
    uncleared = {**variables, "EBBTIDE_CLEAR_HANDED": "0"}
    return [
        Part("hand_over.no_backup", measure_no_backup, environment=uncleared),
        Part("hand_over.cleared", measure_no_backup, environment=variables),
        Part("hand_over.ram", partial(measure_both_ways, backup="ram"), environment=variables),
        Part("hand_over.pinned", partial(measure_both_ways, backup="pinned"), environment=variables),
    ]
