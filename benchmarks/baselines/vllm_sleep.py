"""The algorithm of vLLM's sleep mode (cumem allocator), written anew over the same driver calls.

Asleep: for each segment a new pinned tensor from torch, a synchronous copy, unmap, release. Awake: create, map, copy
back; the pinned tensor returns to torch's cache of pinned memory, which keeps it.
"""

from collections.abc import Sequence
from ctypes import c_uint64

import torch

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.driver import Driver, bytes_at, segments_of
from benchmarks.keepers import Keeper
from benchmarks.tensors import Shape


class _Segment:
    """One segment of a pool: a range, a handle while it is awake, pinned bytes while it sleeps."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = driver.reserve(size_bytes)
        self._driver = driver
        self._host: torch.Tensor | None = None
        self._handle = self._claim()

    def _claim(self) -> c_uint64:
        handle = self._driver.create(self.size_bytes)
        self._driver.map(self.address, self.size_bytes, handle)
        self._driver.set_access(self.address, self.size_bytes)
        return handle

    def sleep(self, has_backup: bool) -> None:
        if has_backup:
            self._host = torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.is_gpu())
            self._driver.copy_to_host(self._host.data_ptr(), self.address, self.size_bytes)
        self._driver.unmap(self.address, self.size_bytes)
        self._driver.release(self._handle)

    def wake(self) -> None:
        self._handle = self._claim()
        if self._host is not None:
            self._driver.copy_to_device(self.address, self._host.data_ptr(), self.size_bytes)
            self._host = None


class VllmSleep(Keeper):
    """Level 1 with a backup, level 2 without."""

    def __init__(self, backup: bool = True) -> None:
        super().__init__()
        self.has_backup = backup
        self._segments: list[_Segment] = []

    def make(self, shapes: Sequence[Shape]) -> None:
        driver = Driver()
        segments, places = segments_of([kept.size_of([shape]) for shape in shapes])
        self._segments = [_Segment(driver, size) for size in segments]
        for shape, (index, offset) in zip(shapes, places, strict=True):
            array = bytes_at(self._segments[index].address + offset, kept.size_of([shape]))
            self.tensors.append(array.view(torch.bfloat16).view(shape))

    def pause(self) -> None:
        for segment in self._segments:
            segment.sleep(self.has_backup)

    def resume(self) -> None:
        for segment in self._segments:
            segment.wake()
