"""The common part of the workloads of large model support: training in parts, in all the memory or in some of it.

The ideal of a step that moves X bytes each way is max(forward, X / L) + max(backward, X / L) + rest, where the link
hides behind computation. `measure_plain` measures those parts, each with the device idle before it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ebbtide
import torch
from torch import nn

from benchmarks import device
from benchmarks.measured import Measured, Stopwatch
from benchmarks.sizes import MIB, Sizes

FIRST_STEPS = 2
PLANNED_AFTER = 12  # steps: the first are recorded, and the next show how much room the plan has to leave
LOADED = ("loaded_bytes", "state_loaded_bytes", "weight_loaded_bytes", "streamed_bytes")
EVICTED = ("evicted_bytes", "state_evicted_bytes", "weight_evicted_bytes")


class Training:
    """A step, in parts. `forward` gives the loss, of the same data in each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, forward: Callable[[], torch.Tensor]) -> None:
        self._optimizer = optimizer
        self.forward = forward

    def parameters(self) -> list[Any]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def finish(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.finish()
        return loss.detach()


Make = Callable[[], Training]


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


def weight_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def time_steps(
    measured: Measured, step: Callable[[], torch.Tensor], steps: int, uncounted: int = FIRST_STEPS
) -> list[float]:
    """Metric "step", after some that are not counted. Returns the losses of all."""
    losses = []
    for number in range(uncounted):
        watch = Stopwatch()
        losses.append(step().item())
        if number == 0:
            measured.facts["first_step_seconds"] = watch.stop()[0]
    for _ in range(steps):
        device.synchronize()
        watch = Stopwatch()
        loss = step()
        device.synchronize()
        measured.add("step", *watch.stop())
        losses.append(loss.item())
    return losses


def needed_bytes(sizes: Sizes, make: Make, steps: int) -> tuple[int, list[float]]:
    """The peak of training without a limit, and its losses."""
    with simulated(sizes):
        peak, training = Peak(), make()
        losses = [training.step().item() for _ in range(steps)]
        return peak.read(), losses


def time_parts(measured: Measured, training: Training, steps: int) -> None:
    """Metrics "forward", "backward" and "rest"."""
    for _ in range(steps):
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


def measure_plain(sizes: Sizes, make: Make) -> Measured:
    """Metrics "step", and its parts."""
    measured = Measured()
    with simulated(sizes):
        peak, training = Peak(), make()
        time_steps(measured, training.step, sizes.training.steps)
        measured.facts["peak_bytes"] = peak.read()
        time_parts(measured, training, sizes.training.steps)
    return measured


def moved_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """The facts `moved_bytes` and `moved_to_host_bytes`: what came to the device, and what left it."""
    return {
        "moved_bytes": round(sum(after[name] - before[name] for name in LOADED)),
        "moved_to_host_bytes": round(sum(after[name] - before[name] for name in EVICTED)),
    }


def measure_limited(sizes: Sizes, make: Make, limit: Callable[[int], int]) -> Measured:
    """Metric "step" under large model support. `limit` makes the limit from the bytes needed without one.

    The facts `moved_bytes` and `moved_to_host_bytes` are those of the last step.
    """
    steps = sizes.training.steps
    needed, losses = needed_bytes(sizes, make, steps + PLANNED_AFTER)
    limit_bytes = limit(needed)
    measured = Measured(facts={"needed_bytes": needed, "limit_bytes": limit_bytes})
    with ebbtide.lms.enable(limit=limit_bytes, min_size=sizes.training.least_bytes):
        training = make()
        found = time_steps(measured, training.step, steps - 1, PLANNED_AFTER)
        before = ebbtide.lms.stats()
        found += time_steps(measured, training.step, 1, 0)
        measured.facts |= {**ebbtide.lms.stats(), **moved_between(before, ebbtide.lms.stats())}
    if found != losses:
        measured.faults.append("the losses are not those of training without a limit")
    if (peak := measured.facts["peak_device_bytes"]) > limit_bytes:
        measured.faults.append(f"{peak / MIB:.0f} MiB were held, and the limit is {limit_bytes / MIB:.0f} MiB")
    return measured
