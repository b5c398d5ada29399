"""How long the device takes to read the weights' bytes once: what finding out that nothing changed costs at least."""

import torch
from ebbtide import saver

from benchmarks import tensors as kept
from benchmarks.measured import Measured, Part
from benchmarks.programs.common import time_each
from benchmarks.sizes import Sizes


def measure(sizes: Sizes) -> Measured:
    """A sum over all words, as torch does it; its result is one number."""
    count = kept.size_of(kept.llama_shapes(sizes.scale)) // 8
    array = torch.zeros(count, dtype=torch.int64, device=saver.device)
    array.sum()
    return Measured(bytes=array.nbytes, seconds={"read": time_each(range(2 * sizes.samples), array.sum)})


def parts(sizes: Sizes) -> list[Part]:
    return [Part("limits.device_read", measure)]
