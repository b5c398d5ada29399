"""A square MLP in fp32 that learns to give random targets for random inputs: always the same ones."""

import torch
from torch import nn

from benchmarks.programs.common import DEVICE


class Training:
    """One model with its optimizer. Weights, gradients and Adam's two moments are 16 bytes a parameter."""

    def __init__(self, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            blocks = [nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(layers)]
            self.model = nn.Sequential(*blocks)
            self._inputs, self._targets = torch.randn(2, batch, width)
        # The fused form makes no temporaries of the size of the weights.
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self._inputs), self._targets)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.detach())

    def loss_values(self) -> list[float]:
        return [loss.item() for loss in self.losses]
