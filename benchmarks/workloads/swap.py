"""Two tags of 15 GiB that take turns: `saver.swap` against pause, then resume, by turns in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ebbtide import saver

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured, Part, Stopwatch, turns
from benchmarks.sizes import Sizes
from benchmarks.tensors import Checker, Sums

Move = Callable[[str, str], object]


def pause_then_resume(leaving: str, coming: str) -> None:
    saver.pause(leaving)
    saver.resume(coming)


def swap(leaving: str, coming: str) -> None:
    saver.swap(pause=leaving, resume=coming)


class Exchange:
    """One of two tags is on the device, the other one away."""

    def __init__(self, sizes: Sizes, **policy: Any) -> None:
        self._checker = Checker()
        self._on, self._away = (Ebbtide(**policy) for _ in range(2))
        shapes = kept.llama_shapes(sizes.scale)
        for keeper in (self._away, self._on):
            keeper.make(shapes)
            kept.fill(keeper.tensors)
        self.bytes = kept.size_of(shapes)
        self._away_sums = self._leave()
        saver.pause(self._away.tag)

    def _leave(self) -> list[Sums]:
        kept.change(self._away.tensors)
        return self._checker.sums(self._away.tensors)

    def take(self, metric: str, move: Move, measured: Measured) -> None:
        """Exchanges the two by `move`; checks what came, and that the device's free memory is as before."""
        expected = self._away_sums
        self._on, self._away = self._away, self._on
        self._away_sums = self._leave()
        device.synchronize()
        free_before = device.free_bytes()
        watch = Stopwatch()
        move(self._away.tag, self._on.tag)
        device.synchronize()
        measured.add(metric, *watch.stop())
        if abs(device.free_bytes() - free_before) > device.allowance_bytes(self.bytes):
            measured.faults.append(f"{metric} changed the device's free memory")
        if self._checker.sums(self._on.tensors) != expected:
            measured.faults.append(f"{metric} changed a tensor's bytes")


def measure(sizes: Sizes, **policy: Any) -> Measured:
    """`bytes` is what goes each way."""
    exchange = Exchange(sizes, **policy)
    ignored = Measured()
    for _ in range(2):  # the first time that a tag leaves is not like the others
        exchange.take("swap", swap, ignored)
        exchange.take("pause_then_resume", pause_then_resume, ignored)
    measured = Measured(bytes=exchange.bytes, faults=ignored.faults)
    for _ in turns(sizes.samples, 2 * sizes.samples, sizes.patience_seconds):
        exchange.take("swap", swap, measured)
        exchange.take("pause_then_resume", pause_then_resume, measured)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("swap.ebbtide_retain", partial(measure, backup="ram", retain=True)),
        Part("swap.ebbtide_pinned", partial(measure, backup="pinned")),
    ]
