"""The device under test: its free memory, waiting for it, and its driver's file. On the simulated one nothing waits."""

import resource
import threading
from pathlib import Path

import torch
from ebbtide import _core, saver

from benchmarks.measured import SkippedError

# The driver takes device memory of its own: for kernels, and for the page tables of pinned host memory, of which a 64th
# is ample. On the simulated device it takes none.
DRIVER_SHARE_BYTES = 64 << 20
PAGE_TABLE_SHARE = 64


def is_gpu() -> bool:
    return saver.device == "cuda"


def need_gpu(why: str) -> None:
    """Raises SkippedError on the simulated device."""
    if not is_gpu():
        raise SkippedError(f"needs a GPU: {why}")


class Capped:
    """torch may reserve so much meanwhile, and no more."""

    def __init__(self, limit_bytes: int) -> None:
        self._fraction = limit_bytes / torch.cuda.mem_get_info()[1]

    def __enter__(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(self._fraction)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)


class HeldBytes:
    """Samples what the driver counts for this process, in a thread, without what it held before torch's memory: the
    context and modules. Of the current device, which nobody else uses meanwhile.
    """

    def __init__(self, period_seconds: float = 0.002) -> None:
        self._period, self._most, self._ended = period_seconds, 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "HeldBytes":
        torch.cuda.init()
        self._device = torch.cuda.current_device()  # a thread begins with the first one
        self._before = self._used() - torch.cuda.memory_reserved()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def most_bytes(self) -> int:
        return self._most

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def _sample(self) -> None:
        while not self._ended.wait(self._period):
            self._most = max(self._most, self._used() - self._before)


def synchronize() -> None:
    if is_gpu():
        torch.cuda.synchronize()


def synchronize_stream() -> None:
    """Waits for the work of the current stream, and for nothing else."""
    if is_gpu():
        torch.cuda.current_stream().synchronize()


def free_bytes() -> int:
    """What any process could take now."""
    if is_gpu():
        return int(torch.cuda.mem_get_info()[0])
    return _core.query_device(0).free_bytes


def allowance_bytes(size_bytes: int) -> int:
    """By how much the device's free memory may differ from the promise of a pause of so many bytes."""
    return DRIVER_SHARE_BYTES + size_bytes // PAGE_TABLE_SHARE if is_gpu() else 0


def resident_bytes() -> int:
    """This process's resident host memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def empty_cache() -> None:
    """torch's cache outside of pools goes back to the driver."""
    if is_gpu():
        torch.cuda.empty_cache()


def driver_library() -> str:
    """The file of the driver that this process works with."""
    return "libcuda.so.1" if is_gpu() else str(Path(_core.loaded_library()).with_name("libebbtide_sim.so"))
