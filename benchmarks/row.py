"""One row of the table."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.goals import Goal


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        moves: how often the part's bytes cross the bus in this figure; 0 where a rate says nothing.
        statistic: what of the figures is held against the goals.
        is_of_full_size: a small run has no such figure.
    """

    workload: str
    who: str
    part: str
    metric: str
    goals: tuple[Goal, ...] = ()
    moves: int = 1
    statistic: Literal["median", "least"] = "median"
    is_of_full_size: bool = False
