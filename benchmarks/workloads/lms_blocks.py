"""Training of transformer blocks in less memory than they need: large model support, and what else there is.

The ideal of a step that moves X bytes each way is max(forward, X / L) + max(backward, X / L) + rest, where the link
hides behind computation. `plain` measures those parts, each with the device idle before it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import ebbtide
import torch
from ebbtide import saver
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import device
from benchmarks.baselines.offload_hooks import OffloadHooks
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import MIB, Sizes
from benchmarks.transformer import Block


class Training:
    """A step, in parts: `forward` gives the loss. All steps of all trainings see the same data."""

    def __init__(self, sizes: Sizes, has_checkpoints: bool = False) -> None:
        size = sizes.training.blocks
        self._has_checkpoints = has_checkpoints
        torch.manual_seed(0)
        data_type = torch.bfloat16 if device.is_gpu() else torch.float32
        with torch.device(saver.device):
            self._blocks = nn.ModuleList(Block(size) for _ in range(size.layers)).to(data_type)
            self._inputs = torch.randn(size.batch, size.tokens, size.hidden, dtype=data_type)
        self._optimizer = torch.optim.SGD(self._blocks.parameters(), lr=1e-4)

    def forward(self) -> torch.Tensor:
        stream = self._inputs
        for block in self._blocks:
            stream = checkpoint(block, stream, use_reentrant=False) if self._has_checkpoints else block(stream)
        return stream.float().pow(2).mean()

    def finish(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.finish()
        return loss.detach()


class Peak:
    """The most device memory that was held since it was made, caches included, in bytes."""

    def __init__(self) -> None:
        if device.is_gpu():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> int:
        return torch.cuda.max_memory_reserved() if device.is_gpu() else int(ebbtide.lms.stats()["peak_device_bytes"])


def simulated(sizes: Sizes) -> AbstractContextManager[Any]:
    """On the simulated device, CPU tensors count only where large model support is on."""
    return nullcontext() if device.is_gpu() else ebbtide.lms.enable(min_size=sizes.training.least_bytes)


FIRST_STEPS = 2
PLANNED_AFTER = 12  # steps: the first are recorded, and the next show how much room the plan has to leave


def time_steps(
    measured: Measured, step: Callable[[], torch.Tensor], steps: int, uncounted: int = FIRST_STEPS
) -> list[float]:
    """Times whole steps, after some that are not counted, and returns the losses of all."""
    watch = Stopwatch()
    losses = [step().item()]
    measured.facts["first_step_seconds"] = watch.stop()[0]
    losses += [step().item() for _ in range(uncounted - 1)]
    for _ in range(steps):
        device.synchronize()
        watch = Stopwatch()
        loss = step()
        device.synchronize()
        measured.add("step", *watch.stop())
        losses.append(loss.item())
    return losses


def needed_bytes(sizes: Sizes, uncounted: int = FIRST_STEPS) -> tuple[int, list[float]]:
    """The peak of training without a limit, and its losses."""
    with simulated(sizes):
        peak, training = Peak(), Training(sizes)
        losses = [training.step().item() for _ in range(sizes.training.steps + uncounted)]
        return peak.read(), losses


def measure_plain(sizes: Sizes) -> Measured:
    """Metrics "step", and its parts "forward", "backward" and "rest"."""
    measured = Measured()
    with simulated(sizes):
        peak, training = Peak(), Training(sizes)
        time_steps(measured, training.step, sizes.training.steps)
        measured.facts["peak_bytes"] = peak.read()
        for _ in range(sizes.training.steps):
            loss: Any = None
            for metric in ("forward", "backward", "rest"):
                device.synchronize()
                watch = Stopwatch()
                if metric == "forward":
                    loss = training.forward()
                else:
                    loss.backward() if metric == "backward" else training.finish()
                device.synchronize()
                measured.add(metric, *watch.stop())
    return measured


def measure_other(sizes: Sizes, kind: str) -> Measured:
    """The step with checkpoints, or with torch's own hooks that save on the CPU."""
    measured = Measured()
    hooks: AbstractContextManager[Any] = nullcontext()
    if kind == "save_on_cpu":
        device.need_gpu("on the simulated device save_on_cpu copies nothing")
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=True)
    with simulated(sizes), hooks:
        peak, training = Peak(), Training(sizes, has_checkpoints=kind == "checkpoint")
        time_steps(measured, training.step, sizes.training.steps)
        measured.facts["peak_bytes"] = peak.read()
    return measured


def measure_hooks(sizes: Sizes, share: int) -> Measured:
    """The hooks that a user would write, which move as much as is over the limit."""
    device.need_gpu("on the simulated device there are no side streams")
    needed, losses = needed_bytes(sizes)
    quota = needed - needed * share // 100
    measured = Measured(facts={"needed_bytes": needed})
    hooks = OffloadHooks(quota, sizes.training.ahead_bytes)
    peak, training = Peak(), Training(sizes)

    def step() -> torch.Tensor:
        hooks.begin_step()
        with hooks:
            return training.step()

    found = time_steps(measured, step, sizes.training.steps)
    measured.facts.update(peak_bytes=peak.read(), moved_bytes=hooks.moved_bytes)
    if found != losses:
        measured.faults.append("the losses are not those of training without a limit")
    return measured


def measure_ebbtide(sizes: Sizes, share: int) -> Measured:
    needed, losses = needed_bytes(sizes, PLANNED_AFTER)
    limit = needed * share // 100
    measured = Measured(facts={"needed_bytes": needed, "limit_bytes": limit})
    with ebbtide.lms.enable(limit=limit, min_size=sizes.training.least_bytes):
        training = Training(sizes)
        loaded: list[float] = []

        def step() -> torch.Tensor:
            loss = training.step()
            loaded.append(ebbtide.lms.stats()["loaded_bytes"])
            return loss

        found = time_steps(measured, step, sizes.training.steps, PLANNED_AFTER)
        measured.facts.update(ebbtide.lms.stats())
        measured.facts["moved_bytes"] = round(loaded[-1] - loaded[-2])
    if found != losses:
        measured.faults.append("the losses are not those of training without a limit")
    if (peak := measured.facts["peak_device_bytes"]) > limit:
        measured.faults.append(f"{peak / MIB:.0f} MiB were held, and the limit is {limit / MIB:.0f} MiB")
    return measured


def parts(sizes: Sizes) -> list[Part]:
    limited = [
        Part(f"lms_blocks.{who}_{share}", partial(measure, share=share))
        for share in sizes.training.shares
        for who, measure in (("ebbtide", measure_ebbtide), ("hooks", measure_hooks))
    ]
    others = [Part(f"lms_blocks.{kind}", partial(measure_other, kind=kind)) for kind in ("checkpoint", "save_on_cpu")]
    return [Part("lms_blocks.plain", measure_plain), *limited, *others]
