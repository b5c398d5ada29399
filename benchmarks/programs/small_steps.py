"""The usual work of a program: launches, driver allocations, training steps. All fits on the device.

It stays, and takes turns on request: "launch", "allocation" or "step".

Arguments: launches, allocations and steps, of each round; allocation_bytes; width, layers and batch of the model. Its
step keeps the device busy for longer than Python needs for it, so that the host's noise does not count.
"""

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.programs.common import DEVICE, IS_GPU, arguments, serve, synchronize, time_each
from benchmarks.programs.mlp import Training

ROUNDS = 6

Turn = Callable[[], float]


def median_of(work: Callable[[], object]) -> float:
    """Of some rounds after the first, which comes after the turns of other processes."""
    return statistics.median(time_each(range(ROUNDS), work)[1:])


def launching(count: int) -> Turn:
    """Until the call returns; the device is idle at the start, and its queue never fills."""
    array = torch.zeros(1, device=DEVICE)

    def turn() -> float:
        rounds = []
        for _ in range(ROUNDS):
            synchronize()
            start = time.perf_counter()
            for _ in range(count):
                array.add_(1)
            rounds.append((time.perf_counter() - start) / count)
        return statistics.median(rounds[1:])

    return turn


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


def allocating(count: int, size_bytes: int) -> Turn:
    work = driver_allocation(size_bytes)

    def some() -> None:
        for _ in range(count):
            work()

    return lambda: median_of(some) / count


def training(width: int, layers: int, batch: int, steps: int) -> Turn:
    trained = Training(width, layers, batch)

    def some() -> None:
        trained.losses.clear()
        for _ in range(steps):
            trained.step()

    return lambda: median_of(some) / steps


def main() -> None:
    given = arguments()
    turns = {
        "launch": launching(given.launches),
        "allocation": allocating(given.allocations, given.allocation_bytes),
        "step": training(given.width, given.layers, given.batch, given.steps),
    }
    for turn in turns.values():  # the first ones load kernels
        turn()
    serve(turns)


if __name__ == "__main__":
    main()
