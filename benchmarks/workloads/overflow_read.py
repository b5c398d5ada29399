"""A kernel reads a tensor that has spilled: all of it, or half of it. Its ops see one tensor at one address."""

from functools import partial

import torch
from ebbtide import _core, saver

from benchmarks.limits.zero_copy import time_sums
from benchmarks.measured import Measured, Part, turns
from benchmarks.programs.common import time_each
from benchmarks.sizes import Sizes

TAG = "spilled"


def make(host_bytes: int, device_bytes: int) -> torch.Tensor:
    """A tensor of 64-bit words of which so much lies on the device, and the rest on the host."""
    saver.configure(device_limit=_core.query_device(0).held_bytes + device_bytes, reserve=0)
    with saver.region(TAG, overflow="split"):
        array = torch.empty((host_bytes + device_bytes) // 8, dtype=torch.int64, device=saver.device)
    saver.configure(device_limit=None)
    return array.fill_(3)


def measure(sizes: Sizes, has_device_half: bool) -> Measured:
    """`read` is a sum over all words, `write` sets them."""
    host_bytes = sizes.overflow.host_bytes
    array = make(host_bytes, host_bytes if has_device_half else 0)
    measured = Measured(bytes=array.nbytes, facts={"host_bytes": saver.tags()[TAG].host_bytes})
    if measured.facts["host_bytes"] != host_bytes:
        measured.faults.append(f"{measured.facts['host_bytes']} bytes lie on the host, of {host_bytes}")
    time_sums(array, "read", measured, sizes)
    times = turns(sizes.samples, 2 * sizes.samples, sizes.patience_seconds)
    measured.seconds["write"] = time_each(times, lambda: array.fill_(3))
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("overflow_read.host", partial(measure, has_device_half=False)),
        Part("overflow_read.half", partial(measure, has_device_half=True)),
    ]
