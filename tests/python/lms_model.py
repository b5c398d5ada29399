"""Models for the tests of large model support."""

import functools

import torch
from ebbtide import lms, torch_extension

MIB = 2**20
SMALL = "16KiB"  # so that most of what these small models save can leave


def make_model(depth=8, width=128):
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
    return torch.nn.Sequential(*layers)


def train(steps=2, depth=8, width=64, batch=4096, before_step=lambda step: None):
    model = make_model(depth, width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        before_step(step)
        optimizer.zero_grad()
        loss = model(torch.randn(batch, width)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def computed_once(function):
    """The same function without large model support. A process computes each result once for all its tests."""

    @functools.cache
    def compute(*arguments, **options):
        assert not lms.enabled
        return function(*arguments, **options)

    return compute


train_plainly = computed_once(train)


@functools.cache
def peak_of_training(**options):
    """The device bytes that `train` takes where nothing has to leave. A process measures them once."""
    with lms.enable(limit="1GiB", min_size=SMALL):
        train(**options)
        return lms.stats()["peak_device_bytes"]


def evict_all():
    """Everything that can leave leaves; how many bytes that is."""
    return torch_extension.load("_lms").evict(2**62)
