"""The benchmark: what ebbtide, its rivals and the machine itself reach, side by side in one run.

    python -m benchmarks run --out benchmarks/results           (`make bench`)
    python -m benchmarks run --works first_pause,swap
    python -m benchmarks table benchmarks/results/bench-h200.json
    python -m benchmarks plots benchmarks/results/bench-h200.json

The exit status of `run` is 1 where something failed or a check found a fault; a target that is missed is no failure.
"""

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import provenance


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure; a table on stdout")
    run.add_argument("--works", help="some of them, with commas between; all by default")
    run.add_argument("--small", action="store_true", help="small sizes: a test of the benchmark, on any machine")
    run.add_argument("--samples", type=int, help="how often each operation is timed (5; with --small 2)")
    run.add_argument("--no-rivals", action="store_true", help="measure ebbtide and the limits only")
    run.add_argument("--timeout", type=float, default=300, help="seconds that one process may take")
    run.add_argument("--plots", action="store_true", help="draw the plots as well; needs --out")
    provenance.add_arguments(run)
    for name, text in (("table", "show results"), ("plots", "draw results, beside their JSON")):
        command = commands.add_parser(name, help=text)
        command.add_argument("files", nargs="+", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.command == "run" and arguments.plots and arguments.out is None:
        parser.error("--plots draws beside the JSON: give --out")
    return arguments


def make_document(origin: dict[str, Any], sizes: Any, is_small: bool, measured: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.rows import judge

    result = {"is_small": is_small, "sizes": dataclasses.asdict(sizes), "rows": judge(measured), "measured": measured}
    return {"provenance": origin, "result": result}


def name_of(origin: dict[str, Any], is_small: bool) -> str:
    """Such as bench-h200."""
    device = "simulated" if origin["driver"] == "sim" else origin["device"].split()[-1].lower()
    return f"bench-{device}{'-small' if is_small else ''}"


def run(arguments: argparse.Namespace) -> int:
    from benchmarks import catalogue, isolation, plots, table
    from benchmarks.runner import Runner, choose, collect_origin, find_failures
    from benchmarks.sizes import Sizes

    try:
        groups = choose(arguments.works.split(",") if arguments.works else catalogue.WORKS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    sizes = Sizes.small() if arguments.small else Sizes()
    if arguments.samples:
        sizes = dataclasses.replace(sizes, samples=arguments.samples)
    found = isolation.run(partial(collect_origin, arguments), {}, arguments.timeout)
    if found["status"] != "ok":
        print(f"ebbtide does not work here: {found['reason']}", file=sys.stderr)
        return 1
    origin = found["origin"]
    if origin["driver"] == "sim" and not arguments.small:
        print("the simulated device says nothing about speed: --small tests the benchmark there", file=sys.stderr)
        return 2
    runner = Runner(sizes, not arguments.no_rivals, arguments.timeout)
    document: dict[str, Any] = {}
    file = None
    for _ in runner.run(groups):  # written again after each group: what is cut off later keeps what it has
        document = make_document(origin, sizes, arguments.small, runner.entries)
        if arguments.out:
            file = provenance.write(arguments.out, name_of(origin, arguments.small), origin, document["result"])
    table.show(document)
    if file:
        print(f"written: {file}")
        for line in plots.draw(document, file) if arguments.plots else ():
            print(line)
    failures = find_failures(runner.entries)
    print("\n".join(["FAILED:", *failures]) if failures else "every part ran, and every check held")
    return 1 if failures else 0


def main() -> int:
    arguments = parse_arguments()
    if arguments.command == "run":
        return run(arguments)
    for file in arguments.files:
        document = json.loads(file.read_text())
        if arguments.command == "table":
            from benchmarks import table

            table.show(document)
        else:  # needs neither torch nor ebbtide
            from benchmarks import plots

            print("\n".join(plots.draw(document, file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
