"""Breaks csrc in one place at a time, and tells which mutants no test notices.

  make mutants SAMPLE=60 SEED=7
  make mutants MUTANTS_ARGS="--at csrc/core/operation/swapped_memory.cpp:8"
  python -m tools.mutants --sample 20 --seed 7 --rooms api,preload

Works on a copy in build/mutants. A sample is drawn evenly over the rooms of csrc, but for the simulator's; a mutant
that does not compile is replaced. A kill counts if the test that noticed passes on the unbroken tree. Survivors are
written with their diffs to the table and to build/mutants/results.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from .operators import Mutation
from .report import Equivalents, Result, describe, make_table, write_json
from .sample import Sample, collect, find_rooms
from .workbench import BaselineError, Verdict, Workbench

EQUIVALENTS = "tools/mutants/equivalent.json"


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sample", type=int, default=60, help="how many mutants are drawn; default 60")
    parser.add_argument("--seed", type=int, default=1, help="of the draw; default 1")
    parser.add_argument("--rooms", default="", help="folders below csrc, separated by commas; default: all but sim")
    parser.add_argument("--with-sim", action="store_true", help="draw from the simulator as well")
    parser.add_argument("--at", action="append", default=[], metavar="PATH[:LINE]", help="every mutant of this place")
    parser.add_argument("--no-sweeps", action="store_true", help="leave out the tests that fail every driver call")
    parser.add_argument("--jobs", type=int, default=2, help="processes for building and testing; default 2")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository; default: the current folder")
    parser.add_argument("--place", type=Path, help="where the copy is built; default: build/mutants in the repository")
    parser.add_argument("--cmake", action="append", default=[], metavar="OPTION", help="a further option of CMake")
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="keep this seed's kills of an earlier run; try the rest"
    )
    return parser.parse_args(words)


def mutants_at(root: Path, places: list[str]) -> list[Mutation]:
    """Every mutant of these files, or of one line of them."""
    found: list[Mutation] = []
    for place in places:
        path, _, line = place.partition(":")
        mutants = collect(root, [path.split("/")[1]], sys.maxsize)[path.split("/")[1]]
        found += [each for each in mutants if each.path == path and (not line or each.line == int(line))]
    return found


class Run:
    """One sample, or the mutants of some places: their facts and their results.

    Args:
        known: verdicts of an earlier run, by path and diff, that are not asked for again.
    """

    def __init__(self, bench: Workbench, equivalents: Equivalents, known: dict[tuple[str, str], Verdict]) -> None:
        self.bench, self.equivalents, self.known = bench, equivalents, known
        self.results: list[Result] = []

    def judge(self, mutation: Mutation, diff: list[str]) -> Verdict:
        verdict = self.known.get((mutation.path, "\n".join(diff)))
        return verdict if verdict is not None else self.bench.judge(mutation)

    def try_one(self, mutation: Mutation) -> Result:
        source = (self.bench.tree / mutation.path).read_text()
        diff = mutation.diff(source)
        reason = self.equivalents.reason(mutation.path, diff)
        verdict = Verdict("survived", "", 0.0) if reason is not None else self.judge(mutation, diff)
        result = describe(mutation, source, verdict, reason or "")
        self.results.append(result)
        return result


def read_known(file: Path) -> dict[tuple[str, str], Verdict]:
    """The kills of an earlier run, and what did not compile: survivors are tried again."""
    earlier = json.loads(file.read_text())["mutants"] if file.is_file() else []
    return {
        (each["path"], "\n".join(each["diff"])): Verdict(each["outcome"], each["by"], each["seconds"])
        for each in earlier
        if each["outcome"] in ("killed", "not compiled")
    }


def main(words: list[str] | None = None) -> int:
    """0: every mutant was killed or is equivalent; 1: some survived; 2: there was nothing to compare with."""
    given = read_arguments(words)
    for ending in (signal.SIGINT, signal.SIGTERM):  # also in the background of a shell, which has it ignored
        signal.signal(ending, signal.default_int_handler)
    root = given.root.resolve()
    place = (given.place or root / "build" / "mutants").resolve()
    bench = Workbench(root, place, given.jobs, not given.no_sweeps, tuple(given.cmake))
    rooms = given.rooms.split(",") if given.rooms else find_rooms(root, given.with_sim)
    file = place / "results" / ("places.json" if given.at else f"seed-{given.seed}.json")
    run = Run(bench, Equivalents(root / EQUIVALENTS), read_known(file) if given.go_on else {})
    facts = {"seed": given.seed, "sample": given.sample, "at": given.at, "rooms": rooms}
    try:
        bench.prepare()
        # Of the copy: changes of the user's tree meanwhile are for the next run.
        mutants = mutants_at(bench.tree, given.at) or Sample(collect(bench.tree, rooms), given.sample, given.seed)
        for mutation in mutants:
            result = run.try_one(mutation)
            print(result.line_of_text(), flush=True)
            write_json(file, run.results, **facts)
            if result.outcome == "not compiled" and isinstance(mutants, Sample):
                mutants.draw_again(mutation)
    except BaselineError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print(make_table(run.results))
    if bench.failing:
        print(f"left out, since they fail on the unbroken tree: {', '.join(bench.failing)}")
    print(f"{file} has every mutant and its diff")
    return 1 if any(result.outcome == "survived" for result in run.results) else 0


if __name__ == "__main__":
    sys.exit(main())
