"""Training with optimizer states, for the tests of large model support."""

import ctypes

import torch
from ebbtide import torch_extension
from lms_model import MIB, computed_once, make_model

TAG = "lms.optimizer"


def extension():
    return torch_extension.load("_lms")


def content(tensors):
    """Hashes of their bytes, which need no device memory."""
    return [hash(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)) for tensor in tensors]


class Training:
    """8 MiB each of weights, gradients and both states; activations of 8 MiB for a batch of 256."""

    def __init__(self, make=torch.optim.AdamW, depth=8, width=512, **options):
        self.model = make_model(depth, width)
        self.width = width
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-3, **options})
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, batch=256):
        return self.model(torch.randn(batch, self.width, generator=self.generator)).pow(2).mean()

    def step(self, batch=256):
        self.optimizer.zero_grad()
        loss = self.forward(batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def states(self):
        found = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each for each in found if isinstance(each, torch.Tensor)]

    def result(self):
        return content([*self.model.parameters(), *self.states()])


def run(batches, **options):
    """Losses, and parameters and states in the end."""
    training = Training(**options)
    losses = [training.step(batch) for batch in batches]
    return losses, training.result()


run_plainly = computed_once(run)

STEADY, FOR_STEADY = (256,) * 3, 28 * MIB  # which it passes by 12 MiB
# The states fit at first, and must go when the batch grows: then they and the needs of one operation are too much.
GROWING, FOR_GROWING = (256, 256, 2048, 2048, 256), 44 * MIB
