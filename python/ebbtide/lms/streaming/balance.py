"""How many optimizer states pass through the device in each step, so that activations need not leave it.

A byte of an activation that leaves crosses the bus twice: out in forward and back in backward. It costs no time as long
as it hides behind computation. A byte of a state that stays on the host crosses it in both directions at once, in the
optimizer step, where nothing hides it. So states stay there for what the device has to wait for, and for no more.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SHARE = 1 / 50  # of a step: shorter waits are not worth a move
STEPS = 3  # alike in a row: before, plans are still made and memory is reclaimed on demand
SPREAD = 1.1  # of the durations of steps that are alike


@dataclass(frozen=True)
class Sample:
    """Counters at the end of an optimizer step.

    Attributes:
        seconds: by the clock.
        waited_seconds: in which the device waited for copies of activations.
    """

    seconds: float
    waited_seconds: float


def more_bytes(samples: Sequence[Sample], bytes_per_second: float) -> int:
    """How many more bytes of states had better stay on the host.

    Args:
        samples: of the last steps, at least `STEPS` + 1 of them.
        bytes_per_second: of one direction of the bus.
    """
    pairs = list(itertools.pairwise(samples))[-STEPS:]
    if len(pairs) < STEPS:
        return 0
    durations = [after.seconds - before.seconds for before, after in pairs]
    waited = min(after.waited_seconds - before.waited_seconds for before, after in pairs)
    if max(durations) > SPREAD * min(durations) or waited < LEAST_SHARE * max(durations):
        return 0
    return int(waited * bytes_per_second / 2)
