"""D: the bare driver calls for the same bytes, without ebbtide, at several sizes of handles.

`claim` is create, map and set-access, `give` unmap and release. The best handle size of each counts.

What a call takes depends on what happened to the device's memory before: on whether it was cleared since it was given
back, and on how it lies. So a workload that is held against D measures it itself, in its own cycles, while its own
memory is away (BareCalls), and has twice as many of them.
"""

import time
from collections.abc import Sequence

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.driver import Driver, round_up, segments_of
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import MIB, Sizes


def cut(size_bytes: int, handle_bytes: int) -> list[int]:
    """Handles of one size, and a rest."""
    whole, rest = divmod(round_up(size_bytes), handle_bytes)
    return [handle_bytes] * whole + ([rest] if rest else [])


def time_calls(driver: Driver, handle_sizes: Sequence[int], rest_seconds: float = 0) -> tuple[float, float]:
    """Seconds to claim and to give back, each after a rest."""
    total = sum(handle_sizes)
    start = driver.reserve(total)
    addresses = [start + sum(handle_sizes[:index]) for index in range(len(handle_sizes))]
    pieces = list(zip(addresses, handle_sizes, strict=True))

    time.sleep(rest_seconds)
    watch = Stopwatch()
    handles = [driver.create(size) for size in handle_sizes]
    for (address, size), handle in zip(pieces, handles, strict=True):
        driver.map(address, size, handle)
    for address, size in pieces:
        driver.set_access(address, size)
    claim_seconds = watch.stop()[0]
    driver.touch(start, total)  # as a tensor's memory is written before it is given back

    device.synchronize()
    time.sleep(rest_seconds)
    watch = Stopwatch()
    for address, size in pieces:
        driver.unmap(address, size)
    for handle in handles:
        driver.release(handle)
    give_seconds = watch.stop()[0]
    driver.free_range(start, total)
    return claim_seconds, give_seconds


def add_calls(measured: Measured, handles: str, seconds: tuple[float, float]) -> None:
    for metric, taken in zip((f"claim {handles}", f"give {handles}"), seconds, strict=True):
        measured.add(metric, taken)


class BareCalls:
    """D within a workload's own cycles: metrics "claim HANDLES" and "give HANDLES" of the workload's part.

    One of the two sizes of handles that have been best at each turn, and the other at the next. Who gave the memory
    back counts, and how: bare claims of 15 GiB took 1.6 to 2 ms where ebbtide's pause had given it back over 0.3 s, and
    4.4 to 6.9 where bare calls had, at once (H200, handles of 1 GiB, a rest of 0.3 s before each).

    Args:
        total_bytes: as much as the workload's memory.
    """

    def __init__(self, total_bytes: int, sizes: Sizes) -> None:
        self._driver = Driver()
        self._rest_seconds = sizes.rest_seconds
        self._choices = [(f"{handle // MIB} MiB", cut(total_bytes, handle)) for handle in sizes.bare_handle_bytes]
        self._turns = 0

    def take_turn(self, measured: Measured) -> None:
        name, handle_sizes = self._choices[self._turns % len(self._choices)]
        self._turns += 1
        add_calls(measured, name, time_calls(self._driver, handle_sizes, self._rest_seconds))


def bytes_of_weights(sizes: Sizes) -> int:
    """Of torch's segments for the 290 tensors."""
    return sum(segments_of([kept.size_of([shape]) for shape in kept.llama_shapes(sizes.scale)])[0])


def measure(sizes: Sizes) -> Measured:
    """40 GiB at every size of handles, one size after the other: what `sizes.bare_handle_bytes` is chosen by."""
    total = sizes.no_backup_tensors * sizes.no_backup_tensor_bytes
    measured = Measured(bytes=total)
    driver = Driver()
    device.empty_cache()
    for handle_bytes in sizes.handle_bytes:
        handle_sizes = cut(total, handle_bytes)
        time_calls(driver, handle_sizes)
        for _ in range(2 * sizes.samples):
            add_calls(measured, f"{handle_bytes // MIB} MiB", time_calls(driver, handle_sizes))
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("limits.driver_calls", measure)]
