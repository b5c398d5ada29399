"""What needs no library: `tensor.cpu()`, drop the tensor, empty torch's cache; `tensor.cuda()` to come back.

The addresses change, so views, optimizers and graphs would have to be made anew.
"""

from collections.abc import Sequence

import torch

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.keepers import Keeper
from benchmarks.tensors import Shape


class PlainCopy(Keeper):
    """Pageable host memory, fresh at each pause."""

    keeps_addresses = False

    def __init__(self) -> None:
        super().__init__()
        device.need_gpu("on the simulated device tensor.cpu() copies nothing")
        self._host: list[torch.Tensor] = []

    def make(self, shapes: Sequence[Shape]) -> None:
        self.tensors = kept.make(shapes)

    def pause(self) -> None:
        self._host = [tensor.cpu() for tensor in self.tensors]
        self.tensors.clear()
        torch.cuda.empty_cache()

    def resume(self) -> None:
        self.tensors = [tensor.cuda() for tensor in self._host]
        self._host.clear()
