"""What `ebbtide run` costs a program for which everything fits: launches, driver allocations, training steps.

The programs of all ways start at once and stay. Then they take short turns, one at a time, in an order that is
reversed each time (ABBA), so that what drifts meets all alike; meanwhile the others wait and use nothing. They share
two cores: which core, and which memory is near it, makes no difference then.

A turn gives the median of its rounds, and a process one figure: that of its quickest turn. Noise only ever adds to a
cost, within a process (other work on the machine) and between processes (where their memory happens to lie). So the
goal holds the least over the processes against the least without ebbtide. The table has the median and the spread too.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack

from benchmarks.answering import Answering
from benchmarks.measured import Measured, Part, turns
from benchmarks.sizes import Sizes

# A pauseable program is shown for comparison only.
SHOWN = ("pauseable",)
PAUSEABLE = {"pauseable": True, "pauseable_all": True}  # the allocations are not made by torch
WAYS: dict[str, Mapping[str, object] | None] = {"plain": None, "run": {}, "pauseable": PAUSEABLE}
METRICS = ("launch", "allocation", "step")
# A training step runs in two threads, one of them at a time. The last cores: the first ones serve interrupts.
CORES = 2
LEAST_TURNS = 2
PATIENCE_SECONDS = 20


def start_all(sizes: Sizes, stack: ExitStack) -> list[tuple[str, Answering]]:
    """The ways by turns, ready."""
    programs = []
    for number in range(sizes.samples):
        for name, options in WAYS.items():
            if name in SHOWN and number >= sizes.shown_samples:
                continue
            program = Answering("small_steps", options, **sizes.overflow.small_steps)
            stack.callback(program.stop)
            programs.append((name, program))
    cores = set(sorted(os.sched_getaffinity(0))[-CORES:])
    for _, program in programs:
        program.read()
        program.pin(cores)
    return programs


def measure(sizes: Sizes) -> Measured:
    """Seconds of one of each: "METRIC WAY" -> the quickest turn of each process."""
    quickest: dict[tuple[str, str], dict[int, float]] = {}
    count = 0
    with ExitStack() as stack:
        programs = start_all(sizes, stack)
        order = list(enumerate(programs))
        for _ in turns(LEAST_TURNS, sizes.overflow.overhead_turns, PATIENCE_SECONDS):
            count += 1
            for metric in METRICS:
                for number, (name, program) in order:
                    seconds = program.ask(metric)["seconds"]
                    of_way = quickest.setdefault((metric, name), {})
                    of_way[number] = min(seconds, of_way.get(number, seconds))
            order.reverse()
    figures = {f"{metric} {name}": list(values.values()) for (metric, name), values in quickest.items()}
    return Measured(seconds=figures, facts={"turns": count})


def parts(_: Sizes) -> list[Part]:
    return [Part("run_overhead.turns", measure)]
