"""A part: what one fresh process measures. Workloads and limits are made of parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.measured import Measured
from benchmarks.sizes import Sizes


@dataclass(frozen=True)
class Part:
    """One entry of what a workload's or a limit's `parts` gives.

    Attributes:
        name: "WORKLOAD.WHO" or "limits.WHAT": the key of its figures in the JSON.
        measure: what runs in the fresh process.
        is_first_only: a process gives one sample, since only its first operation counts; so there are as many processes
            as samples are asked for.
        processes: how many those are at most.
        environment: variables that the process gets.
        least_seconds: it is not started where the budget has less left than this.
    """

    name: str
    measure: Callable[[Sizes], Measured]
    is_first_only: bool = False
    processes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    least_seconds: float = 0
