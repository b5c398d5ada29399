"""L: copies between pinned memory and the device by the copy engine, each way and both at once."""

import torch
from ebbtide import saver

from benchmarks import device
from benchmarks.measured import Measured, Part
from benchmarks.programs.common import time_each
from benchmarks.sizes import Sizes


def measure(sizes: Sizes) -> Measured:
    """`both` moves `bytes` each way."""
    size = sizes.link_bytes
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.is_gpu()) for _ in range(2)]
    arrays = [torch.zeros(size, dtype=torch.uint8, device=saver.device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if device.is_gpu() else [None, None]

    def to_host() -> None:
        with torch.cuda.stream(streams[0]):
            hosts[0].copy_(arrays[0], non_blocking=True)

    def to_device() -> None:
        with torch.cuda.stream(streams[1]):
            arrays[1].copy_(hosts[1], non_blocking=True)

    def both() -> None:
        to_host()
        to_device()

    measured = Measured(bytes=size)
    for name, copy in (("to_host", to_host), ("to_device", to_device), ("both", both)):
        copy()
        measured.seconds[name] = time_each(range(2 * sizes.samples), copy)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("limits.link", measure)]
