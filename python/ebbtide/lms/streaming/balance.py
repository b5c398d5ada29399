"""How many optimizer states pass through the device in each step, so that activations need not leave it.

A byte of an activation that leaves crosses the bus twice: out in forward and back in backward. It costs no time as long
as it hides behind computation. A byte of a state that stays on the host crosses it in both directions at once, in the
optimizer step, where nothing hides it. So states stay there for what the device has to wait for, and for no more.
"""

from dataclasses import dataclass

LEAST_SHARE = 1 / 50  # of a step: shorter waits are not worth a move


@dataclass(frozen=True)
class Sample:
    """Counters at the end of an optimizer step.

    Attributes:
        seconds: by the clock.
        waited_seconds: in which the device waited for copies of activations.
        disturbances: what makes a step unlike the others: new plans, and allocations that did not fit.
    """

    seconds: float
    waited_seconds: float
    disturbances: int


def more_bytes(before: Sample, now: Sample, bytes_per_second: float) -> int:
    """How many more bytes of states had better stay on the host, from the step between two samples.

    Args:
        bytes_per_second: of one direction of the bus.
    """
    waited = now.waited_seconds - before.waited_seconds
    if now.disturbances != before.disturbances or waited < LEAST_SHARE * (now.seconds - before.seconds):
        return 0
    return int(waited * bytes_per_second / 2)
