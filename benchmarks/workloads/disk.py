"""Pause to disk and resume from it. The limit is plain O_DIRECT with the same requests (limits/direct_io.py).

A resume is over when the bytes are there; the space of its files goes back in the background, as long as that takes
(`free` of the limit). Each pause here begins when it has, or after some seconds, since others use the disk as well.
"""

import os
import time
from collections.abc import Sequence

import torch

from benchmarks import tensors as kept
from benchmarks.cycles import Cycle, repeat
from benchmarks.keepers import Ebbtide
from benchmarks.limits.direct_io import directory
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import Sizes

LONGEST_WAIT_SECONDS = 5
TOLERANCE = 0.05  # of the bytes that were moved: what else is written to the disk meanwhile


def free_bytes() -> int:
    status = os.statvfs(directory())
    return status.f_bavail * status.f_frsize


def measure(sizes: Sizes) -> Measured:
    """As many threads copy as the limit has requests in flight."""
    shapes = kept.llama_shapes(sizes.disk_scale)
    enough = free_bytes() - TOLERANCE * kept.size_of(shapes)
    waits: list[float] = []

    def change(tensors: Sequence[torch.Tensor]) -> None:
        watch = Stopwatch()
        while free_bytes() < enough and watch.stop()[0] < LONGEST_WAIT_SECONDS:
            time.sleep(0.01)
        waits.append(watch.stop()[0])
        kept.change(tensors)

    measured = repeat(Cycle(Ebbtide(backup="disk"), shapes, change), sizes)
    measured.facts["longest_wait_for_space_seconds"] = max(waits)
    measured.facts["space_did_not_come_back"] = sum(waited >= LONGEST_WAIT_SECONDS for waited in waits)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("disk.ebbtide", measure, environment={"EBBTIDE_COPY_THREADS": str(sizes.requests_in_flight)})]
