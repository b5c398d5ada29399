"""The benchmark: what ebbtide, the baselines and the machine itself reach, side by side in one run.

    python -m benchmarks run --out benchmarks/results           (`make bench`)
    python -m benchmarks run --workloads first_pause,swap
    python -m benchmarks run --budget 300 --out first.json      (then the others, with --workloads)
    python -m benchmarks merge first.json second.json --out benchmarks/results
    python -m benchmarks table benchmarks/results/bench-h200.json
    python -m benchmarks plots benchmarks/results/bench-h200.json

The JSON is written anew after each part. Ctrl-C and SIGTERM end a run with the table of what there is.

The exit status of `run` is 1 where something failed, a check found a fault, or a signal came; a target that is missed
is no failure.
"""

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
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
    run.add_argument("--workloads", help="some of them, with commas between; by default all but copy_tuning")
    run.add_argument("--small", action="store_true", help="small sizes: a test of the benchmark, on any machine")
    run.add_argument("--samples", type=int, help="how often each operation is timed (5; with --small 2)")
    run.add_argument("--no-baselines", action="store_true", help="measure ebbtide and the limits only")
    run.add_argument("--budget", type=float, help="seconds after which nothing more is measured")
    run.add_argument("--timeout", type=float, default=300, help="seconds that one process may take")
    run.add_argument("--plots", action="store_true", help="draw the plots as well; needs --out")
    provenance.add_arguments(run)
    for name, text in (("table", "show results"), ("plots", "draw results as SVG")):
        command = commands.add_parser(name, help=text)
        command.add_argument("files", nargs="+", type=Path, metavar="FILE")
        if name == "plots":
            command.add_argument("--out", type=Path, help="a folder; by default the drawings lie beside their JSON")
    merge = commands.add_parser("merge", help="several runs of one revision on one kind of machine as one result")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    merge.add_argument("--out", type=Path, required=True, help="a file, or a folder for NAME.json")
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


def write_document(document: dict[str, Any], out: Path | None) -> Path | None:
    if out is None:
        return None
    origin, result = document["provenance"], document["result"]
    return provenance.write(out, name_of(origin, result["is_small"]), origin, result)


def run(arguments: argparse.Namespace) -> int:
    from benchmarks import isolation

    started = time.monotonic()
    isolation.start()
    from benchmarks import catalogue, plots, table
    from benchmarks.runner import Runner, choose, collect_origin, find_failures
    from benchmarks.sizes import Sizes

    try:
        workloads = [name for name in catalogue.WORKLOADS if name not in catalogue.ON_DEMAND]
        groups = choose(arguments.workloads.split(",") if arguments.workloads else workloads)
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
    budget = arguments.budget and max(0.0, arguments.budget - (time.monotonic() - started))
    runner = Runner(groups, sizes, not arguments.no_baselines, arguments.timeout, budget)

    def write() -> tuple[dict[str, Any], Path | None]:
        document = make_document(origin, sizes, arguments.small, runner.entries)
        return document, write_document(document, arguments.out)

    is_stopped = not run_to_the_end(runner, write)
    document, file = write()
    table.show(document)
    if file:
        print(f"written: {file}")
        for line in plots.draw(document, file.stem, file.parent) if arguments.plots else ():
            print(line)
    failures = find_failures(runner.entries)
    left_out = [name for name, entry in runner.entries.items() if entry["status"] == "left out"]
    if left_out:
        print(f"not measured: {', '.join(left_out)}")
    ran = "every" if left_out else "every part ran, and every"
    print("\n".join(["FAILED:", *failures]) if failures else f"{ran} check held")
    return 1 if failures or is_stopped else 0


def run_to_the_end(runner: Any, after_each: Callable[[], object]) -> bool:
    """False: a signal came before the end; another one is then ignored, so that what there is can be shown."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for _ in runner.run():
            after_each()
    except KeyboardInterrupt:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        runner.leave_out("stopped by a signal")
        return False
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return True


def merge(arguments: argparse.Namespace) -> int:
    from benchmarks import merging, table

    try:
        document = merging.merge([json.loads(file.read_text()) for file in arguments.files])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    table.show(document)
    print(f"written: {write_document(document, arguments.out)}")
    return 0


def main() -> int:
    arguments = parse_arguments()
    if arguments.command == "run":
        return run(arguments)
    if arguments.command == "merge":
        return merge(arguments)
    for file in arguments.files:
        document = json.loads(file.read_text())
        if arguments.command == "table":
            from benchmarks import table

            table.show(document)
        else:  # needs neither torch nor ebbtide
            from benchmarks import plots

            print("\n".join(plots.draw(document, file.stem, arguments.out or file.parent)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
