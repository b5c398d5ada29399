"""What large model support costs where everything fits: steps with it and without, by turns in one process.

Each way has a model of its own, since the parameters of the one are made while large model support is on. Its first
steps of each turn are not counted: they record the step anew.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import ebbtide

from benchmarks import device
from benchmarks.lms_training import FIRST_STEPS, Make, Training
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.resnet import make_training as make_resnet
from benchmarks.sizes import Sizes
from benchmarks.workloads.lms_blocks import make_training as make_blocks

MAKERS: dict[str, Callable[[Sizes], Training]] = {
    "blocks": make_blocks,
    "resnet": lambda sizes: make_resnet(sizes.training.resnet),
    "small_net": lambda sizes: make_resnet(sizes.training.small_net),
}


def measure(sizes: Sizes, make: Callable[[Sizes], Training]) -> Measured:
    """Metrics "plain" and "ebbtide": seconds of a step."""
    measured = Measured()
    made: Make = partial(make, sizes)
    plain = made()
    with ebbtide.lms.enable(min_size=sizes.training.least_bytes):
        supported = made()
    size = sizes.training
    for _ in range(size.fits_turns):
        for metric, training in (("plain", plain), ("ebbtide", supported)):
            is_supported = metric == "ebbtide"
            with ebbtide.lms.enable(min_size=size.least_bytes) if is_supported else nullcontext():
                time_turn(measured, metric, training, size.fits_steps)
                if is_supported:
                    measured.facts["evicted_bytes"] = ebbtide.lms.stats()["evicted_bytes"]
    if measured.facts["evicted_bytes"]:
        measured.faults.append("something left, so not everything fits")
    return measured


def time_turn(measured: Measured, metric: str, training: Training, steps: int) -> None:
    for number in range(FIRST_STEPS + steps):
        device.synchronize()
        watch = Stopwatch()
        training.step()
        device.synchronize()
        if number >= FIRST_STEPS:
            measured.add(metric, *watch.stop())


def parts(_: Sizes) -> list[Part]:
    return [Part(f"lms_fits.{name}", partial(measure, make=make)) for name, make in MAKERS.items()]
