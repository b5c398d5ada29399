"""Helpers for the tests of weights and gradients that leave."""

from contextlib import contextmanager

import torch
from ebbtide import _core
from lms_model import MIB
from lms_states import extension

TAG, GRADIENTS = "lms.weights", "lms.gradients"
DEPTH = 12  # of 1 MiB each
LIMIT = 6 * MIB
STEPS = [256] * 3


def tag_of(tensor):
    found = _core.find(tensor.data_ptr())
    return None if found is None else found.tag


def on_host(*tensors):
    return [each for each in tensors if _core.find(each.data_ptr()).host_bytes > 0]


def send_all_away():
    return extension().make_room_of_weights(0, 2**62)


@contextmanager
def in_use():
    """As during a module's call: no other thread moves anything."""
    with extension().ModuleUse() as use:
        use.begin({}, False)
        yield


def evaluate(model, times=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return [model(torch.randn(32, 512, generator=generator)).sum().item() for _ in range(times)]


class Own(torch.nn.Linear):
    """A layer that ebbtide does not know: it wants its weight on the device."""

    def forward(self, given):
        return torch.nn.functional.linear(given, self.weight, self.bias)


def make_own_model(depth, width):
    """As make_model."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(part for _ in range(depth) for part in (Own(width, width), torch.nn.GELU())))
