"""The benchmark: what ebbtide, the baselines and the machine itself reach, side by side in one run.

The JSON is written anew after each part. Ctrl-C and SIGTERM end a run with the table of what there is.

The exit status of `run` is 1 where something failed, a check found a fault, or a signal came; a target that is missed
is no failure.
"""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks import provenance

FILES = click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
OUT = click.Path(path_type=Path)


@click.group(help=__doc__)
def main() -> None:
    pass


def name_of(origin: dict[str, Any], is_small: bool) -> str:
    """Such as bench-h200: of "NVIDIA H100 80GB HBM3" the first word with a digit."""
    words = origin["device"].lower().split()
    model = next((word for word in words if any(map(str.isdigit, word))), words[-1])
    device = "simulated" if origin["driver"] == "sim" else model
    return f"bench-{device}{'-small' if is_small else ''}"


def write_document(document: dict[str, Any], out: Path) -> Path:
    name = name_of(document["provenance"], document["result"]["is_small"])
    return provenance.write(out, name, document)


@main.command()
@click.option("--workloads", help="Some of them, with commas between; by default all but copy_tuning and lms_largest.")
@click.option("--parts", help="Some of their parts: names with * and commas, as the lines of a run show them.")
@click.option("--small", is_flag=True, help="Small sizes: a test of the benchmark, on any machine.")
@click.option("--samples", type=int, help="How often each operation is timed (5; with --small 2).")
@click.option("--no-baselines", is_flag=True, help="Measure ebbtide and the limits only.")
@click.option("--budget", type=float, help="Seconds after which nothing more is measured.")
@click.option("--timeout", type=float, default=300, help="Seconds that one process may take.")
@click.option("--out", type=OUT, help="Write the result as JSON: a file, or a folder for NAME.json.")
@click.option("--revision", default=provenance.git_revision, help="Of the sources, where there is no git.")
def run(out: Path | None, revision: str, **options: Any) -> None:
    """Measure; a table on stdout."""
    from benchmarks import isolation

    started = time.monotonic()
    isolation.start()
    from benchmarks import catalogue, table
    from benchmarks.rows import judge
    from benchmarks.runner import Runner, choose, collect_origin, find_failures, only_parts
    from benchmarks.sizes import Sizes

    is_small = options["small"]
    workloads = [name for name in catalogue.WORKLOADS if name not in catalogue.ON_DEMAND]
    try:
        groups = choose(options["workloads"].split(",") if options["workloads"] else workloads)
        groups = only_parts(groups, options["parts"].split(",")) if options["parts"] else groups
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    sizes = Sizes.small() if is_small else Sizes()
    if options["samples"]:
        sizes = dataclasses.replace(sizes, samples=options["samples"])
    recorded = {"command": "run", **options}
    found = isolation.run(partial(collect_origin, recorded, revision), {}, options["timeout"])
    if found["status"] != "ok":
        raise click.ClickException(f"ebbtide does not work here: {found['reason']}")
    origin = found["origin"]
    if origin["driver"] == "sim" and not is_small:
        raise click.UsageError("the simulated device says nothing about speed: --small tests the benchmark there")
    budget = options["budget"] and max(0.0, options["budget"] - (time.monotonic() - started))
    runner = Runner(groups, sizes, not options["no_baselines"], options["timeout"], budget)

    def write() -> tuple[dict[str, Any], Path | None]:
        rows = judge(runner.entries)
        result = {"is_small": is_small, "sizes": dataclasses.asdict(sizes), "rows": rows, "measured": runner.entries}
        document = {"provenance": origin, "result": result}
        return document, out and write_document(document, out)

    is_stopped = not run_to_the_end(runner, write)
    document, file = write()
    table.show(document)
    if file:
        print(f"written: {file}")
    failures = find_failures(runner.entries)
    left_out = [name for name, entry in runner.entries.items() if entry["status"] == "left out"]
    if left_out:
        print(f"not measured: {', '.join(left_out)}")
    ran = "every" if left_out else "every part ran, and every"
    print("\n".join(["FAILED:", *failures]) if failures else f"{ran} check held")
    sys.exit(1 if failures or is_stopped else 0)


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


@main.command()
@FILES
@click.option("--out", type=OUT, required=True, help="A file, or a folder for NAME.json.")
def merge(files: tuple[Path, ...], out: Path) -> None:
    """Put several runs of one revision on one kind of machine together as one result."""
    from benchmarks import merging, table

    try:
        document = merging.merge([json.loads(file.read_text()) for file in files])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    table.show(document)
    print(f"written: {write_document(document, out)}")


@main.command()
@FILES
def table(files: tuple[Path, ...]) -> None:
    """Show results."""
    from benchmarks import table

    for file in files:
        table.show(json.loads(file.read_text()))


@main.command()
@FILES
@click.option("--out", type=OUT, help="A folder; by default the drawings lie beside their JSON.")
def plots(files: tuple[Path, ...], out: Path | None) -> None:
    """Draw results as SVG. Needs neither torch nor ebbtide."""
    from benchmarks import plots

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for file in files:
        print("\n".join(plots.draw(json.loads(file.read_text()), file.stem, out or file.parent)))


@main.command()
def pages() -> None:
    """Write the figures of README.md and docs/performance.md from the results that their comments name."""
    from benchmarks.pages import PAGES, write_figures

    for name in PAGES:
        path = provenance.ROOT / name
        path.write_text(write_figures(path.read_text()))


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
