"""What a program does all the time: launches, driver allocations, training steps. All fits on the device.

Arguments: launches, allocations, allocation_bytes, width, layers, batch, steps.
"""

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.programs.common import DEVICE, IS_GPU, answer, arguments, synchronize, time_each
from benchmarks.programs.mlp import Training

ROUNDS = 7


def median_of(work: Callable[[], object]) -> float:
    """Of some rounds after the first."""
    return statistics.median(time_each(range(ROUNDS), work)[1:])


def seconds_per_launch(count: int) -> float:
    """Until the call returns; the device is idle at the start, and its queue never fills."""
    array = torch.zeros(1, device=DEVICE)
    rounds = []
    for _ in range(ROUNDS * count // 500):
        synchronize()
        start = time.perf_counter()
        for _ in range(500):
            array.add_(1)
        rounds.append((time.perf_counter() - start) / 500)
    return statistics.median(rounds)


def driver_allocation(size_bytes: int) -> Callable[[], object]:
    """An allocation and its free, as cudaMalloc asks the driver; torch's where there is no driver."""
    if not IS_GPU:
        return lambda: torch.empty(size_bytes, dtype=torch.uint8).zero_()
    synchronize()  # the context is there, and current
    driver = ctypes.CDLL("libcuda.so.1")
    address, size = ctypes.c_uint64(), ctypes.c_size_t(size_bytes)

    def allocate_and_free() -> None:
        codes = driver.cuMemAlloc_v2(ctypes.byref(address), size), driver.cuMemFree_v2(address)
        assert codes == (0, 0), codes

    return allocate_and_free


def seconds_per_allocation(count: int, size_bytes: int) -> float:
    work = driver_allocation(size_bytes)

    def some() -> None:
        for _ in range(count):
            work()

    return median_of(some) / count


def seconds_per_step(width: int, layers: int, batch: int, steps: int) -> float:
    training = Training(width, layers, batch)

    def some() -> None:
        for _ in range(steps):
            training.step()

    return median_of(some) / steps


def main() -> None:
    given = arguments()
    answer(
        launch=seconds_per_launch(given.launches),
        allocation=seconds_per_allocation(given.allocations, given.allocation_bytes),
        step=seconds_per_step(given.width, given.layers, given.batch, given.steps),
    )


if __name__ == "__main__":
    main()
