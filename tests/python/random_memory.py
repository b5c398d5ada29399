"""Random content for memory of the device, of which no pause skips a block."""

from typing import Any

import torch


def random_bytes(count: int, device: Any) -> torch.Tensor:
    """A tensor of so many bytes, a multiple of 8. They are drawn 8 at a time: torch takes four times as long for
    single ones."""
    drawn = torch.empty(count, dtype=torch.uint8, device=device)
    drawn.view(torch.int64).random_()
    return drawn
