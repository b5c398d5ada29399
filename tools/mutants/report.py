"""What came of a sample: equivalent mutants that are known, the table, the JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from .operators import Mutation
from .workbench import Verdict

OUTCOMES = ("killed", "survived", "equivalent", "not compiled")


@dataclass(frozen=True)
class Result:
    """One mutant and its end; reason is given for those that are known to be equivalent."""

    path: str
    line: int
    operator: str
    diff: list[str]
    outcome: str
    by: str
    seconds: float
    reason: str = ""

    @property
    def room(self) -> str:
        return self.path.split("/")[1]

    def line_of_text(self) -> str:
        detail = self.by or self.reason
        head = f"{self.outcome:<12} {self.path}:{self.line} {self.operator} ({self.seconds:.0f} s)"
        changed = "".join(f"\n    {line}" for line in self.diff) if self.outcome == "survived" else ""
        return head + (f" {detail}" if detail else "") + changed


class Equivalents:
    """Mutants that no test can notice: tools/mutants/equivalent.json names each by path and diff, with the reason."""

    def __init__(self, file: Path) -> None:
        self.entries: list[dict[str, object]] = json.loads(file.read_text()) if file.is_file() else []
        self._reasons = {(str(entry["path"]), self._key(entry["diff"])): str(entry["reason"]) for entry in self.entries}

    @staticmethod
    def _key(diff: object) -> str:
        return "\n".join(diff) if isinstance(diff, list) else str(diff)

    def reason(self, path: str, diff: list[str]) -> str | None:
        return self._reasons.get((path, self._key(diff)))


def describe(mutation: Mutation, source: str, verdict: Verdict, reason: str = "") -> Result:
    outcome = "equivalent" if reason else verdict.outcome
    diff = mutation.diff(source)
    seconds = round(verdict.seconds, 1)
    return Result(mutation.path, mutation.line, mutation.operator, diff, outcome, verdict.by, seconds, reason)


def make_table(results: list[Result]) -> str:
    """Rooms by outcomes; the rate is of those that are not equivalent."""
    rooms = sorted({result.room for result in results})
    lines = [f"{'room':<10} {'mutants':>8} {'killed':>7} {'survived':>9} {'equivalent':>11} {'rate':>6}"]
    for room in [*rooms, "all"]:
        counts = Counter(result.outcome for result in results if room in ("all", result.room))
        judged = counts["killed"] + counts["survived"]
        rate = f"{100 * counts['killed'] / judged:.0f} %" if judged else "-"
        total = judged + counts["equivalent"]
        numbers = f"{total:>8} {counts['killed']:>7} {counts['survived']:>9} {counts['equivalent']:>11}"
        lines.append(f"{room:<10} {numbers} {rate:>6}")
    return "\n".join(lines)


def write_json(file: Path, results: list[Result], **facts: object) -> None:
    counts = Counter(result.outcome for result in results)
    text = json.dumps(
        {
            **facts,
            "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
            "mutants": [asdict(result) for result in results],
        },
        indent=1,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")
