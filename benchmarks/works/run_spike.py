"""A training loop whose model does not fit for a while, and goes on: the same losses, and its old speed after.

`kept` and `emptied` are a program that knows nothing of ebbtide, under `ebbtide run`: what the spike freed stays in
torch's cache, or the program empties that. `region` is the same loop in a region, as in examples/06_train_spike.py.
"""

from functools import partial
from typing import Any

from ebbtide import saver

from benchmarks import unmodified
from benchmarks.measured import Measured
from benchmarks.parts import Part
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


def train(width: int, warm_steps: int, steps: int, spike: dict[str, int]) -> tuple[list[float], list[float], int]:
    """Seconds of each step after the warm ones, every loss, and the bytes that lie on the host meanwhile."""
    with saver.region(TAG, overflow="split", threads="all"):
        training = Training(width, spike["layers"], spike["batch"])
        time_each(range(warm_steps), training.step)
        seconds = time_each(range(steps), training.step)
        return seconds, training.loss_values(), saver.tags()[TAG].host_bytes


def measure_region(sizes: Sizes) -> Measured:
    """The same metrics."""
    size = sizes.overflow
    spike, warm_steps = size.spike, size.spike["warm_steps"]
    plain = unmodified.run("spike", None, **spike, empties_cache=False)
    Training(spike["narrow"], 1, spike["batch"]).step()  # what torch keeps for itself lies outside of the region
    saver.configure(device_limit=size.limit_bytes)
    before, first_losses, _ = train(spike["narrow"], warm_steps, spike["steps"], spike)
    during, wide_losses, host_bytes = train(spike["wide"], 1, spike["wide_steps"], spike)
    after, last_losses, left_bytes = train(spike["narrow"], warm_steps, spike["steps"], spike)
    measured = Measured(facts={"host_bytes": host_bytes, "host_bytes_after": left_bytes})
    take(measured, "", {"before": before, "spike": during, "after": after})
    take(measured, "plain_", plain.figures)
    compare(measured, [first_losses, wide_losses, last_losses], plain.figures["losses"])
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("run_spike.kept", partial(measure_run, empties_cache=False)),
        Part("run_spike.emptied", partial(measure_run, empties_cache=True)),
        Part("run_spike.region", measure_region),
    ]
