"""How fast the device reads host memory over the bus: one kernel over pinned memory, without a copy."""

import torch

from benchmarks import device
from benchmarks.driver import bytes_at
from benchmarks.measured import Measured, Part, turns
from benchmarks.programs.common import time_each
from benchmarks.sizes import Sizes


def time_sums(array: torch.Tensor, metric: str, measured: Measured, sizes: Sizes) -> None:
    """A sum over all words, as torch does it. The words are all 3."""
    expected = 3 * array.numel()
    if int(array.sum()) != expected:
        measured.faults.append("a kernel read wrong bytes")
    times = turns(sizes.samples, 2 * sizes.samples, sizes.patience_seconds)
    measured.seconds[metric] = time_each(times, array.sum)


def measure(sizes: Sizes) -> Measured:
    size_bytes = sizes.overflow.host_bytes
    host = torch.full((size_bytes // 8,), 3, dtype=torch.int64, pin_memory=device.is_gpu())
    measured = Measured(bytes=size_bytes)
    time_sums(bytes_at(host.data_ptr(), size_bytes).view(torch.int64), "read", measured, sizes)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("limits.zero_copy", measure)]
