"""A pause and a resume, timed and checked.

Timed: from the call of pause to its return, when other processes must be able to have the memory; from the call of
resume until the device has nothing left to do. Checked, outside of that: free memory on the device, every address,
and every tensor's sums, taken on the device before the pause.
"""

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.keepers import Keeper
from benchmarks.measured import Measured, Stopwatch, turns
from benchmarks.sizes import Sizes
from benchmarks.tensors import Checker, Shape

Change = Callable[[Sequence[torch.Tensor]], None]
WhilePaused = Callable[[Measured], None]


def nothing(_: object) -> None:
    """The change of workloads that change nothing, and what most do while paused."""


class Cycle:
    """Pauses and resumes one keeper's tensors, again and again.

    Args:
        keeper: holds no tensors yet.
        change: what happens to the tensors before each pause.
        rest_seconds: before the pause, and before the resume.
        before_pause: what happens right before the watch starts.
        while_paused: what happens between the two, once the memory was found free; may add metrics.
    """

    def __init__(
        self,
        keeper: Keeper,
        shapes: Sequence[Shape],
        change: Change = kept.change,
        rest_seconds: float = 0,
        *,
        before_pause: Callable[[], object] = lambda: None,
        while_paused: WhilePaused = nothing,
    ) -> None:
        self._keeper = keeper
        self._change = change
        self._rest_seconds = rest_seconds
        self._before_pause = before_pause
        self._while_paused = while_paused
        self._checker = Checker() if keeper.has_backup else None
        keeper.make(shapes)
        kept.fill(keeper.tensors)
        self.bytes = sum(tensor.nbytes for tensor in keeper.tensors)

    def warm_up(self) -> None:
        """A cycle that is checked but not counted: the first is not like the others."""
        ignored = Measured()
        self.run(ignored)
        if ignored.faults:
            raise AssertionError("; ".join(ignored.faults))

    def run(self, measured: Measured, pause: str = "pause", resume: str = "resume") -> None:
        """One cycle; its times go to these metrics."""
        keeper = self._keeper
        self._change(keeper.tensors)
        expected = self._checker.sums(keeper.tensors) if self._checker else []
        addresses = [tensor.data_ptr() for tensor in keeper.tensors]
        device.synchronize()
        free_before = device.free_bytes()

        time.sleep(self._rest_seconds)
        self._before_pause()
        watch = Stopwatch()
        keeper.pause()
        measured.add(pause, *watch.stop())
        freed = device.free_bytes() - free_before
        self._while_paused(measured)

        time.sleep(self._rest_seconds)
        watch = Stopwatch()
        keeper.resume()
        device.synchronize()
        measured.add(resume, *watch.stop())

        measured.bytes = self.bytes
        measured.faults += self._find_faults(freed, addresses, expected)
        measured.facts.update(keeper.facts())

    def _find_faults(self, freed: int, addresses: list[int], expected: list[kept.Sums]) -> list[str]:
        keeper = self._keeper
        faults = keeper.faults()
        if freed < self.bytes - device.allowance_bytes(self.bytes):
            faults.append(f"after the pause {freed} bytes more were free, of {self.bytes}")
        if keeper.keeps_addresses and [tensor.data_ptr() for tensor in keeper.tensors] != addresses:
            faults.append("an address changed")
        if self._checker and self._checker.sums(keeper.tensors) != expected:
            faults.append("a tensor's bytes changed")
        if keeper.drops_to_zeros and any(bool(kept.words(tensor).any()) for tensor in keeper.tensors):
            faults.append("what had no backup did not come back as zeros")
        return faults


def repeat(cycle: Cycle, sizes: Sizes, least: int | None = None) -> Measured:
    """Cycles after a first one that does not count; `least` of them, by default as many as the sizes say."""
    least = least or sizes.samples
    measured = Measured()
    cycle.warm_up()
    for _ in turns(least, max(least, 2 * sizes.samples), sizes.patience_seconds):
        cycle.run(measured)
    return measured
