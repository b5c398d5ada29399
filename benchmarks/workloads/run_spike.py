"""A training loop whose model does not fit for a while, and goes on: the same losses, and its old speed after.

`kept` and `emptied` are a program that knows nothing of ebbtide, under `ebbtide run`: memory that the spike freed stays
in torch's cache, or the program empties that. `region` is the same loop in regions with a tag for each model, which is
trimmed afterwards, as in examples/06_train_spike.py; `one_region` has one tag, and trims nothing.
"""

import gc
from functools import partial
from typing import Any

import torch
from ebbtide import saver

from benchmarks import unmodified
from benchmarks.measured import Measured, Part
from benchmarks.programs.common import time_each
from benchmarks.programs.mlp import Training
from benchmarks.sizes import Sizes

TAG = "training"


def take(measured: Measured, prefix: str, figures: dict[str, Any]) -> None:
    for metric in ("before", "spike", "after"):
        measured.seconds[prefix + metric] = figures[metric]


def compare(measured: Measured, losses: list[list[float]], plain: list[list[float]]) -> None:
    if losses != plain:
        measured.faults.append("the losses are not those of the run without a limit")
    if losses[0] != losses[2]:
        measured.faults.append("the losses after the spike are not those before it")


def measure_run(sizes: Sizes, empties_cache: bool) -> Measured:
    """Metrics are seconds of a step: "before", "spike" and "after" it; and those without ebbtide: "plain_spike" ..."""
    size = sizes.overflow
    arguments = {**size.spike, "empties_cache": empties_cache}
    ran = unmodified.run("spike", {"device_limit": size.limit_bytes, "summary": True}, **arguments)
    plain = unmodified.run("spike", None, **arguments)
    measured = Measured(facts={"said": ran.said})
    take(measured, "", ran.figures)
    take(measured, "plain_", plain.figures)
    compare(measured, ran.figures["losses"], plain.figures["losses"])
    return measured


class RegionTraining:
    """The three phases, in regions that may spill."""

    def __init__(self, spike: dict[str, int], has_one_tag: bool) -> None:
        self._spike = spike
        self._has_one_tag = has_one_tag

    def train(self, width: int, warm_steps: int, steps: int) -> tuple[list[float], list[float], int]:
        """Seconds of each step after the warm ones, every loss, and the tag's bytes on the host meanwhile."""
        tag = TAG if self._has_one_tag else f"{TAG}-{width}"
        with saver.region(tag, overflow="split", threads="all"):
            training = Training(width, self._spike["layers"], self._spike["batch"])
            time_each(range(warm_steps), training.step)
            seconds = time_each(range(steps), training.step)
            host_bytes = saver.tags()[tag].host_bytes
        losses = training.loss_values()
        del training
        gc.collect()
        if not self._has_one_tag:
            saver.trim(tag)
        return seconds, losses, host_bytes


def measure_region(sizes: Sizes, has_one_tag: bool) -> Measured:
    """The same metrics."""
    size = sizes.overflow
    spike, warm_steps = size.spike, size.spike["warm_steps"]
    plain = unmodified.run("spike", None, **spike, empties_cache=False)
    Training(spike["narrow"], 1, spike["batch"]).step()  # torch's own memory lies outside of the region
    saver.configure(device_limit=size.limit_bytes, reserve=size.limit_bytes // 8)
    torch.set_num_threads(1)  # as the program has: on the simulated device it matters to the last bit
    regions = RegionTraining(spike, has_one_tag)
    before, first_losses, first_bytes = regions.train(spike["narrow"], warm_steps, spike["steps"])
    during, wide_losses, host_bytes = regions.train(spike["wide"], 1, spike["wide_steps"])
    after, last_losses, left_bytes = regions.train(spike["narrow"], warm_steps, spike["steps"])
    measured = Measured(facts={"host_bytes": host_bytes, "host_bytes_after": left_bytes})
    take(measured, "", {"before": before, "spike": during, "after": after})
    take(measured, "plain_", plain.figures)
    compare(measured, [first_losses, wide_losses, last_losses], plain.figures["losses"])
    if first_bytes or left_bytes or not host_bytes:
        measured.faults.append(
            f"the narrow model spilled {first_bytes} bytes, the wide one {host_bytes}, and the narrow one after it "
            f"{left_bytes}"
        )
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("run_spike.kept", partial(measure_run, empties_cache=False)),
        Part("run_spike.emptied", partial(measure_run, empties_cache=True)),
        Part("run_spike.region", partial(measure_region, has_one_tag=False)),
        Part("run_spike.one_region", partial(measure_region, has_one_tag=True)),
    ]
