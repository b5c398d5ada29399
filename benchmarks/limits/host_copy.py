"""What the processors of the host copy between a ring and memory that exists: out, in, and both at once; and what is
left of that while the copy engines move bytes over the bus, both ways. Beside it, what the driver takes to pin that
memory and to unpin it, which would spare the copies.

No swap into memory that is not pinned can be faster than `both`: each byte of it is copied once by the processors.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from ebbtide import saver

from benchmarks import device
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import MIB, Sizes

PART_BYTES = 8 * MIB  # with less, Python takes a part of the time
RING_BYTES = 64 * MIB  # of each direction
OUT_THREADS, IN_THREADS = 8, 10  # the most that ebbtide takes for one of them
PINNED_BYTES = 256 * MIB  # at once


class Side:
    """Copies between a pinned ring and memory of the host, each thread every so many-th part."""

    def __init__(self, size: int, is_out: bool) -> None:
        self.ring = torch.ones(min(RING_BYTES, size), dtype=torch.uint8, pin_memory=device.is_gpu())
        self.memory = torch.ones(size, dtype=torch.uint8)
        self._is_out, self._count = is_out, OUT_THREADS if is_out else IN_THREADS

    def threads(self) -> list[threading.Thread]:
        return [threading.Thread(target=self._copy, args=(number,)) for number in range(self._count)]

    def _copy(self, number: int) -> None:
        ring, memory, size = self.ring.data_ptr(), self.memory.data_ptr(), self.memory.nbytes
        for at in range(number * PART_BYTES, size, self._count * PART_BYTES):
            pair = (ring + at % self.ring.nbytes, memory + at)
            # ctypes gives the interpreter's lock away for the length of a call.
            ctypes.memmove(*(reversed(pair) if self._is_out else pair), min(PART_BYTES, size - at))


class BusyBus(AbstractContextManager[None]):
    """Copies both ways between pinned memory and the device for the length of a `with`."""

    def __init__(self, size: int) -> None:
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.is_gpu()) for _ in range(2)]
        self._arrays = [torch.zeros(size, dtype=torch.uint8, device=saver.device) for _ in range(2)]
        self._ends = threading.Event()

    def __enter__(self) -> None:
        self._ends.clear()
        self._threads = [threading.Thread(target=self._copy, args=(is_out,)) for is_out in (True, False)]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _copy(self, is_out: bool) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if device.is_gpu() else None):
            while not self._ends.is_set():
                target, source = (self._hosts[0], self._arrays[0]) if is_out else (self._arrays[1], self._hosts[1])
                target.copy_(source, non_blocking=True)
                device.synchronize_stream()


def run(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def each_range(memory: torch.Tensor, call: Callable[[int, int], object]) -> None:
    for at in range(0, memory.nbytes, PINNED_BYTES):
        call(memory.data_ptr() + at, min(PINNED_BYTES, memory.nbytes - at))


def measure(sizes: Sizes) -> Measured:
    """`both` copies `bytes` each way."""
    size = sizes.host_copy_bytes
    measured = Measured(bytes=size)
    out, back = Side(size, True), Side(size, False)
    copies = {"out": (out,), "in": (back,), "both": (out, back)}
    for how in ("", " beside the bus"):
        with ExitStack() as stack:
            if how:
                stack.enter_context(BusyBus(sizes.link_bytes // 4))
            for name, sides in copies.items():
                for turn in range(1 + sizes.samples):
                    threads = [thread for side in sides for thread in side.threads()]
                    watch = Stopwatch()
                    run(threads)
                    if turn:
                        measured.add(name + how, *watch.stop())
            if device.is_gpu():
                pin(measured, sizes.samples, back.memory, how)
    return measured


def pin(measured: Measured, samples: int, memory: torch.Tensor, how: str) -> None:
    runtime = torch.cuda.cudart()
    for _ in range(samples):
        watch = Stopwatch()
        each_range(memory, lambda address, size: runtime.cudaHostRegister(address, size, 0))
        measured.add("pin" + how, *watch.stop())
        watch = Stopwatch()
        each_range(memory, lambda address, _: runtime.cudaHostUnregister(address))
        measured.add("unpin" + how, *watch.stop())


def parts(sizes: Sizes) -> list[Part]:
    return [Part("limits.host_copy", measure)]
