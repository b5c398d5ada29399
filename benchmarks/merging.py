"""Several short runs as one result: each part comes from one of them, and is held against the limits of that same run.

Only ratios from one run mean anything, so a limit of another run is taken where there is no other, and then said to be
one (`is_other_run`).
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.goals import Entries
from benchmarks.rows import ROWS, judge_row, was_run

# The runs must have these in common.
SAME = ("driver", "device", "cuda_driver", "cores", "torch", "ebbtide", "revision")


def merge(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a part that several runs have, the last sound figures count. `run` is an index into `provenance.runs`.

    Raises:
        ValueError: the runs do not belong together.
    """
    check(documents)
    origins = [document["provenance"] for document in documents]
    results = [document["result"] for document in documents]
    measured = choose([result["measured"] for result in results])
    origin = {name: value for name, value in origins[0].items() if all(other[name] == value for other in origins)}
    rows = [judge(row, results, measured) for row in ROWS if was_run(row, measured)]
    return {
        "provenance": {**origin, "runs": origins},
        "result": {**results[0], "rows": rows, "measured": measured},
    }


def check(documents: Sequence[dict[str, Any]]) -> None:
    origins = [document["provenance"] for document in documents]
    if any("runs" in origin for origin in origins):
        raise ValueError("one of these is merged already: give the runs themselves")
    for name in SAME:
        values = list(dict.fromkeys(str(origin[name]) for origin in origins))
        if len(values) > 1:
            raise ValueError(f"these runs do not belong together: {name} is {' and '.join(values)}")
    if len({document["result"]["is_small"] for document in documents}) > 1:
        raise ValueError("these runs do not belong together: some are small")


def choose(runs: Sequence[Entries]) -> Entries:
    def soundness(entry: dict[str, Any]) -> int:
        return (entry["status"] == "ok") + (entry["status"] == "ok" and not entry["faults"])

    chosen: Entries = {}
    for number, entries in enumerate(runs):
        for name, entry in entries.items():
            if name not in chosen or soundness(entry) >= soundness(chosen[name]):
                chosen[name] = {**entry, "run": number}
    return chosen


def judge(row: Any, results: Sequence[dict[str, Any]], measured: Entries) -> dict[str, Any]:
    run = measured[row.part]["run"]
    judged = judge_row(row, results[run]["measured"])
    across = judge_row(row, measured)
    judged["goals"] = [
        own if own["ratio"] is not None or other["ratio"] is None else {**other, "is_other_run": True}
        for own, other in zip(judged["goals"], across["goals"], strict=True)
    ]
    return {**judged, "run": run}
