"""What `ebbtide run` costs a program for which everything fits: launches, driver allocations, training steps.

One figure a process, by turns with and without ebbtide.
"""

from collections.abc import Mapping
from functools import partial

from benchmarks import unmodified
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.sizes import Sizes

# A pauseable program is shown for comparison only.
SHOWN = ("pauseable",)
WAYS: dict[str, Mapping[str, object] | None] = {"plain": None, "run": {}, "pauseable": {"pauseable": True}}
METRICS = ("launch", "allocation", "step")


def measure(sizes: Sizes, options: Mapping[str, object] | None) -> Measured:
    """Seconds of one of each."""
    ran = unmodified.run("small_steps", options, **sizes.overflow.small_steps)
    return Measured(seconds={metric: [ran.figures[metric]] for metric in METRICS})


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(
            f"run_overhead.{name}",
            partial(measure, options=options),
            is_first_only=True,
            processes=sizes.shown_samples if name in SHOWN else None,
        )
        for name, options in WAYS.items()
    ]
