"""`ebbtide demo`."""

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ebbtide.demo.size import JobSize
from ebbtide.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from ebbtide.demo.job import JobResult

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _size_options(command: _Command) -> _Command:
    for entry in reversed(dataclasses.fields(JobSize)):
        name = f"--{entry.name.replace('_', '-')}"
        option = click.option(
            name, type=entry.type, default=entry.default, show_default=True, help=entry.metadata["meaning"]
        )
        command = option(command)
    return command


@click.command()
@_size_options
def demo(**options: Any) -> None:
    """Train a model and generate with its copy, in turns on one device.

    A small language model learns from real text while a copy of it generates. Each phase pauses the memory of the
    other. The job runs twice, without pausing and with it, and losses, texts and final weights must be the same to the
    last bit: then the exit status is 0, else 1.
    """
    try:
        from ebbtide import saver

        size = JobSize(**options)
        where = "GPU" if saver.device == "cuda" else "simulated device"  # decides the driver, and says so
    except ValueError as error:  # of an option, or of a variable that is read now
        raise click.UsageError(str(error)) from None
    reference, result = _run_both(size, where)
    sys.exit(_show(result, result.differences(reference)))


def _run_both(size: JobSize, where: str) -> "tuple[JobResult, JobResult]":
    """Without pausing, then with it, under one progress bar."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ebbtide.demo.job import run_job

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=2 * size.rounds * size.steps)
        try:
            progress.update(bar, description="in ordinary memory, without pausing")
            reference = run_job(size, is_pausing=False, on_step=lambda _: progress.advance(bar))
            progress.update(bar, description=f"on the {where}, with pausing")
            return reference, run_job(size, is_pausing=True, on_step=lambda _: progress.advance(bar))
        except torch.OutOfMemoryError as error:
            raise click.ClickException(f"out of memory: make the job smaller (--width, --batch). {error}") from error


def _show(result: "JobResult", differences: list[str]) -> int:
    """Prints the result; returns the exit status."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if result.moves:
        console.print(_table(result))
    else:
        console.print("nothing was paused: EBBTIDE_DRIVER=off makes every call a no-op", style="yellow")
    first, last = result.mean_loss(0), result.mean_loss(-1)
    console.print(f"mean loss: {first:.3f} in the first round, {last:.3f} in the last")
    console.print(Text(f"the last text: {result.texts[-1]!r}"))
    if result.moves:
        tenants = format_size(sum(result.bytes_by_tag.values()))
        console.print(
            f"at most {format_size(result.peak_bytes)} were on the device at once; all tags together are {tenants}"
        )
    if differences:
        console.print(f"FAILED: not as without pausing: {', '.join(differences)}", style="bold red")
        return 1
    console.print(
        "identical to the run without pausing: losses, texts, final weights; same addresses throughout", style="green"
    )
    return 0


def _table(result: "JobResult") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("round", "phase", "tags", "freed", "claimed", "took", "then held", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[2].min_width = len("trainer_weights,")
    for column in table.columns[3:]:
        column.justify = "right"
    shown = 0
    for move in result.moves:
        report = move.report
        size = format_size(report.bytes)
        freed, claimed = (size, "") if report.kind == "pause" else ("", size)
        table.add_row(
            str(move.round) if move.round != shown else "",
            move.phase,
            ", ".join(report.by_tag),
            freed,
            claimed,
            f"{report.seconds * 1000:.1f} ms",
            format_size(move.held_bytes),
        )
        shown = move.round
    return table
