"""Steps that call modules, and limits for them, for the tests of large model support that recomputes."""

import functools

import lms_models
import torch
from ebbtide import lms
from lms_model import SMALL, computed_once

SLOW, FAST = 1e6, 1e12  # bytes a second
STEPS = 7


def run(step, steps=STEPS):
    torch.manual_seed(1)
    return [step(number) for number in range(steps)]


run_plainly = computed_once(lambda make: run(make()))


def blocks_of(kind=lambda: lms_models.Block(64, 4), count=8):
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


def through(blocks):
    return functools.reduce(lambda hidden, block: block(hidden), blocks, torch.randn(8, 32, 64))


def chain(
    blocks,
    call=lambda number, block, hidden: block(hidden),
    backward=lambda number, loss: loss.backward(),
):
    """A step that calls the blocks one after the other, without a module around them. It returns its loss and a sum of
    gradients."""

    def step(number):
        hidden = torch.randn(8, 32, 64)
        for index, block in enumerate(blocks):
            hidden = call(index, block, hidden)
        loss = hidden.pow(2).mean()
        for block in blocks:
            block.zero_grad()
        backward(number, loss)
        gradients = (each.grad for block in blocks for each in block.parameters() if each.grad is not None)
        return loss.item(), next(gradients).sum().item()

    return step


def chain_of_blocks():
    return chain(blocks_of())


@functools.cache
def peak_of(make):
    """The device bytes of a training that needs to move nothing. A process measures them once."""
    with lms.enable(limit="4GiB", min_size=SMALL):
        run(make(), 2)
        return lms.stats()["peak_device_bytes"]
