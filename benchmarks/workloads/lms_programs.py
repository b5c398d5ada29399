"""Programs of many kinds in less memory than they need: large model support, by evictions alone and with recomputing,
and the checkpoints that a user types first.

A losses' fault is one beyond what kernels that add in no fixed order differ by.
"""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import ebbtide
import torch
from ebbtide.lms import calls

from benchmarks import device, lms_programs
from benchmarks.lms_training import PLANNED_AFTER, Peak, simulated
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import MIB, Sizes

LOSS_TOLERANCE = 0.02
LIMIT_TOLERANCE = 0.02  # of the limit, that the driver may count beyond it
LOSSES = 4  # of the first steps, are compared


def run(measured: Measured, program: lms_programs.Program, uncounted: int, steps: int) -> list[float]:
    """Metrics "step", and "first" of the steps that are not counted. Returns the losses of all."""
    losses = []
    for number in range(uncounted + steps):
        device.synchronize()
        watch = Stopwatch()
        loss = program.step(number)
        device.synchronize()
        measured.add("step" if number >= uncounted else "first", *watch.stop())
        losses.append(loss.item())
    return losses


def measure_plain(sizes: Sizes, name: str, stride: int = 0) -> Measured:
    """Without large model support. stride: of the blocks that are checkpointed; 0: none."""
    measured = Measured()
    with simulated(sizes):
        peak = Peak()
        program = lms_programs.make(name, sizes.training.programs[name])
        if stride:
            program.checkpoint_each(stride)
        try:
            run(measured, program, 3, sizes.training.steps)
        except torch.OutOfMemoryError:
            measured.facts["is_out_of_memory"] = True
        measured.facts["peak_bytes"] = peak.read()
    return measured


def measure_limited(sizes: Sizes, name: str, share: int, recompute: Literal["auto", False]) -> Measured:
    """Within a share of the peak, in percent."""
    arguments = sizes.training.programs[name]
    with simulated(sizes):
        peak, plain = Peak(), Measured()
        program = lms_programs.make(name, arguments)
        losses = run(plain, program, LOSSES, 0)
        needed = peak.read()
    del program
    if device.is_gpu():
        torch.cuda.empty_cache()
    limit = needed * share // 100
    measured = Measured(facts={"needed_bytes": needed, "limit_bytes": limit})
    with ebbtide.lms.enable(limit=limit, min_size=sizes.training.least_bytes, recompute=recompute):
        with device.HeldBytes() if device.is_gpu() else nullcontext() as held:  # which costs time
            program = lms_programs.make(name, arguments)
            found = run(measured, program, PLANNED_AFTER, 0)
        flushes = count_flushes()
        run(measured, program, 0, sizes.training.steps)
        measured.facts |= {**ebbtide.lms.stats(), "recomputed": [name for name, _, _ in calls.recomputed()]}
        measured.facts["flushes"] = count_flushes() - flushes
        measured.facts["choices"] = [line for line in ebbtide.lms.report().splitlines() if line.startswith("steps ")]
        measured.facts["driver_bytes"] = held.most_bytes() if held else 0
    check(measured, losses, found[:LOSSES])
    return measured


def check(measured: Measured, losses: list[float], found: list[float]) -> None:
    facts: dict[str, Any] = measured.facts
    if any(not math.isclose(one, other, rel_tol=LOSS_TOLERANCE) for one, other in zip(losses, found, strict=True)):
        measured.faults.append(f"losses without a limit {losses}, within it {found}")
    most = max(facts["peak_device_bytes"], facts["driver_bytes"] / (1 + LIMIT_TOLERANCE))
    if most > facts["limit_bytes"]:
        measured.faults.append(f"{most / MIB:.0f} MiB were held, and the limit is {facts['limit_bytes'] / MIB:.0f} MiB")


def count_flushes() -> int:
    """How often torch gave back what it cached, and waited for the device, before an allocation found room."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if device.is_gpu() else 0


def parts(sizes: Sizes) -> list[Part]:
    found = []
    for name in sizes.training.programs:
        found.append(Part(f"lms_programs.{name}_plain", partial(measure_plain, name=name)))
        for stride in sizes.training.strides:
            measure = partial(measure_plain, name=name, stride=stride)
            found.append(Part(f"lms_programs.{name}_checkpoint_{stride}", measure))
        for share in sizes.training.program_shares:
            for way, recompute in (("evict", False), ("auto", "auto")):
                limited: Any = partial(measure_limited, name=name, share=share, recompute=recompute)
                found.append(Part(f"lms_programs.{name}_{way}_{share}", limited))
    return found
