"""Training with optimizer states, for the tests of large model support."""

import ctypes
import gc
import signal

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
    """8 MiB each of weights, gradients and both states; activations of 2 MiB, or 8 for a batch of 256.

    At most `rows` of a batch pass through the layers, since that takes long. A larger batch repeats their result.
    """

    def __init__(self, make=torch.optim.AdamW, depth=8, width=512, rows=256, **options):
        self.model = make_model(depth, width)
        self.width, self.rows = width, rows
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-3, **options})
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, batch=64):
        hidden = self.model(torch.randn(min(batch, self.rows), self.width, generator=self.generator))
        if batch > self.rows:
            hidden = hidden.repeat(batch // self.rows, 1).sin()
        return hidden.pow(2).mean()

    def step(self, batch=64):
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


class InterruptError(Exception):
    pass


class Interrupts:
    """Interrupts calls after some time, and counts those that were."""

    def __init__(self, error=InterruptError):
        self._error = error

    def __enter__(self):
        self.count, self._before = 0, signal.signal(signal.SIGALRM, self._interrupt)
        gc.disable()  # an interrupt in a callback of the collector, such as torch's, ends there
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        gc.enable()
        torch.set_grad_enabled(True)

    def _interrupt(self, *_):
        raise self._error

    def after(self, seconds, step, times):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            for _ in range(times):
                step()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except self._error:
            self.count += 1
        torch.set_grad_enabled(True)  # torch's own step may leave it off
        assert not extension().is_in_step()


def run(batches, **options):
    """Losses, and parameters and states in the end."""
    training = Training(**options)
    losses = [training.step(batch) for batch in batches]
    return losses, training.result()


run_plainly = computed_once(run)

STEADY, FOR_STEADY = (64,) * 3, 28 * MIB  # which it passes by 6 MiB
# The states fit at first, and must go when the batch grows: then they and the needs of one operation are too much.
GROWING, FOR_GROWING = (256, 256, 2048, 2048, 256), 40 * MIB
