"""The tensors that are moved: made, filled, changed, and summed up so that a wrong byte shows."""

import random
from collections.abc import Sequence

import torch
from ebbtide import saver

LAYERS, HIDDEN, FEED, KEY_VALUE, VOCABULARY = 32, 4096, 14336, 1024, 128256
CHECK_PIECE = 1 << 22

Shape = tuple[int, ...]
Sums = tuple[int, int]


def llama_shapes(scale: float = 1.0) -> list[Shape]:
    """Llama-3-8B's tensors, but for the last norm: 290. Each holds a multiple of 8 bytes in bf16."""
    block = [(HIDDEN, HIDDEN), (KEY_VALUE, HIDDEN), (KEY_VALUE, HIDDEN), (HIDDEN, HIDDEN)]
    block += [(FEED, HIDDEN), (FEED, HIDDEN), (HIDDEN, FEED)]
    matrices = [(VOCABULARY, HIDDEN), *(block * LAYERS), (VOCABULARY, HIDDEN)]
    shapes: list[Shape] = [(max(1, int(rows * scale)), columns) for rows, columns in matrices]
    return shapes + [(HIDDEN,)] * (2 * LAYERS)


def equal_shapes(count: int, size_bytes: int) -> list[Shape]:
    """`count` tensors of this size in bf16."""
    return [(size_bytes // 2,)] * count


def size_of(shapes: Sequence[Shape]) -> int:
    """Their bytes in bf16."""
    return sum(2 * torch.Size(shape).numel() for shape in shapes)


def make(shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Uninitialised, on the device under test."""
    return [torch.empty(shape, dtype=torch.bfloat16, device=saver.device) for shape in shapes]


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as 64-bit words."""
    return tensor.detach().flatten().view(torch.int64)


def fill(tensors: Sequence[torch.Tensor]) -> None:
    """Random bits: nothing in them is constant or occurs twice."""
    torch.manual_seed(0)
    for tensor in tensors:
        words(tensor).random_()


def change(tensors: Sequence[torch.Tensor]) -> None:
    """Changes every word, so that no block is as it was."""
    step = random.randrange(1, 1 << 62, 2)
    for tensor in tensors:
        words(tensor).add_(step)


def every_tenth(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A tenth of the tensors, spread evenly; of the ten ways to begin, the one whose bytes are nearest to a tenth."""
    total = sum(tensor.nbytes for tensor in tensors)
    choices = [list(tensors[start::10]) for start in range(10)]
    return min(choices, key=lambda choice: abs(sum(tensor.nbytes for tensor in choice) / total - 0.1))


class Checker:
    """Sums of tensors, computed on the device."""

    def __init__(self) -> None:
        self._weights = torch.arange(1, 2 * CHECK_PIECE, 2, device=saver.device)  # odd: every bit of a word counts

    def sums(self, tensors: Sequence[torch.Tensor]) -> list[Sums]:
        """Two sums of each tensor modulo 2**64, the second one aware of each word's position."""
        found = torch.zeros((len(tensors), 2), dtype=torch.int64, device=saver.device)
        for tensor, sums in zip(tensors, found, strict=True):
            for number, piece in enumerate(words(tensor).split(CHECK_PIECE)):
                sums[0] += piece.sum()
                sums[1] += (2 * number + 1) * (piece * self._weights[: len(piece)]).sum()
        return [(plain, weighted) for plain, weighted in found.tolist()]  # the only wait for the device
