"""Training of transformer blocks in less memory than they need: large model support, and what else there is."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from ebbtide import saver
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import device
from benchmarks.baselines import trl_offload
from benchmarks.baselines.offload_hooks import OffloadHooks
from benchmarks.lms_training import (
    FIRST_STEPS,
    Peak,
    Training,
    measure_limited,
    measure_plain,
    needed_bytes,
    simulated,
    time_steps,
)
from benchmarks.measured import Measured, Part, SkippedError
from benchmarks.sizes import Sizes
from benchmarks.transformer import Block


def make_training(sizes: Sizes, has_checkpoints: bool = False) -> Training:
    size = sizes.training.blocks
    torch.manual_seed(0)
    data_type = torch.bfloat16 if device.is_gpu() else torch.float32
    with torch.device(saver.device):
        blocks = nn.ModuleList(Block(size) for _ in range(size.layers)).to(data_type)
        inputs = torch.randn(size.batch, size.tokens, size.hidden, dtype=data_type)

    def forward() -> torch.Tensor:
        stream = inputs
        for block in blocks:
            stream = checkpoint(block, stream, use_reentrant=False) if has_checkpoints else block(stream)
        return stream.float().pow(2).mean()

    return Training(torch.optim.SGD(blocks.parameters(), lr=1e-4), forward)


def measure_other(sizes: Sizes, kind: str) -> Measured:
    """The step with checkpoints, or with torch's own hooks that save on the CPU."""
    measured = Measured()
    hooks: AbstractContextManager[Any] = nullcontext()
    if kind == "save_on_cpu":
        device.need_gpu("on the simulated device save_on_cpu copies nothing")
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=True)
    with simulated(sizes), hooks:
        peak, training = Peak(), make_training(sizes, has_checkpoints=kind == "checkpoint")
        time_steps(measured, training.step, sizes.training.steps)
        measured.facts["peak_bytes"] = peak.read()
    return measured


def measure_trl(sizes: Sizes) -> Measured:
    """The step with TRL's OffloadActivations, which moves whatever is saved but the last five."""
    device.need_gpu("TRL takes streams of a GPU")
    measured = Measured()
    peak, training = Peak(), make_training(sizes)
    hooks = trl_offload.make_hooks(training.parameters())

    def step() -> torch.Tensor:
        with hooks:
            return training.step()

    time_steps(measured, step, sizes.training.steps)
    measured.facts.update(peak_bytes=peak.read(), version=trl_offload.version())
    return measured


def measure_hooks(sizes: Sizes, share: int) -> Measured:
    """The hooks that a user would write, in the same memory: as much moves as is over the limit, and what they hold
    ahead of need.
    """
    device.need_gpu("on the simulated device there are no side streams")
    needed, losses = needed_bytes(sizes, partial(make_training, sizes), sizes.training.steps + FIRST_STEPS)
    limit, ahead = needed * share // 100, sizes.training.ahead_bytes
    measured = Measured(facts={"needed_bytes": needed, "limit_bytes": limit})
    hooks = OffloadHooks(needed - limit + ahead, ahead)
    with device.Capped(limit):
        peak, training = Peak(), make_training(sizes)

        def step() -> torch.Tensor:
            hooks.begin_step()
            with hooks:
                return training.step()

        try:
            found = time_steps(measured, step, sizes.training.steps)
        except torch.OutOfMemoryError as error:
            raise SkippedError("the hooks are out of memory in this limit") from error
    measured.facts.update(peak_bytes=peak.read(), moved_bytes=hooks.moved_bytes)
    if found != losses:
        measured.faults.append("the losses are not those of training without a limit")
    return measured


def measure_ebbtide(sizes: Sizes, share: int) -> Measured:
    return measure_limited(sizes, partial(make_training, sizes), lambda needed: needed * share // 100)


def measure_both(sizes: Sizes) -> Measured:
    """Checkpoints in so much less memory than they need that the inputs of all blocks but two have to leave."""
    size = sizes.training.blocks
    input_bytes = size.batch * size.tokens * size.hidden * (2 if device.is_gpu() else 4)
    make = partial(make_training, sizes, has_checkpoints=True)
    return measure_limited(sizes, make, lambda needed: needed - (size.layers - 2) * input_bytes)


def measure_without_limit(sizes: Sizes) -> Measured:
    return measure_plain(sizes, partial(make_training, sizes))


def parts(sizes: Sizes) -> list[Part]:
    limited = [
        Part(f"lms_blocks.{who}_{share}", partial(measure, share=share))
        for share in sizes.training.shares
        for who, measure in (("ebbtide", measure_ebbtide), ("hooks", measure_hooks))
    ]
    others = [Part(f"lms_blocks.{kind}", partial(measure_other, kind=kind)) for kind in ("checkpoint", "save_on_cpu")]
    others.append(Part("lms_blocks.trl", measure_trl))
    both = Part("lms_blocks.ebbtide_checkpoint", measure_both)
    return [Part("lms_blocks.plain", measure_without_limit), *limited, *others, both]
