"""A training loop whose model does not fit for a while, under `ebbtide run`: the same losses, and its old speed after.

The programs know nothing of ebbtide. `kept` leaves what the spike freed in torch's cache, `emptied` empties that.
"""

from functools import partial

from benchmarks import unmodified
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, empties_cache: bool) -> Measured:
    """Metrics are seconds of a step: "before", "spike" and "after" it; and those without ebbtide: "plain_spike" ..."""
    size = sizes.overflow
    arguments = {**size.spike, "empties_cache": empties_cache}
    options = {"device_limit": size.limit_bytes, "summary": True}
    ran = unmodified.run("spike", options, **arguments)
    plain = unmodified.run("spike", None, **arguments)
    measured = Measured(facts={"said": ran.said})
    for prefix, outcome in (("", ran), ("plain_", plain)):
        for metric in ("before", "spike", "after"):
            measured.seconds[prefix + metric] = outcome.figures[metric]
    if ran.figures["losses"] != plain.figures["losses"]:
        measured.faults.append("the losses are not those of the run without a limit")
    if ran.figures["losses"][0] != ran.figures["losses"][2]:
        measured.faults.append("the losses after the spike are not those before it")
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("run_spike.kept", partial(measure, empties_cache=False)),
        Part("run_spike.emptied", partial(measure, empties_cache=True)),
    ]
