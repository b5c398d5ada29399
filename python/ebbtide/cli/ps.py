"""`ebbtide ps`."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from ebbtide.processes import folder
from ebbtide.processes.entries import Entry
from ebbtide.sizes import format_size

_UNBROKEN = 1000  # columns: what a program reads keeps its lines


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, with sizes in bytes.")
def ps(as_json: bool) -> None:
    """List this user's processes that share devices, and what they hold.

    A process has a row for each tag, and one for each resume that waits. Processes are listed that asked for it:
    saver.configure(shared=True), EBBTIDE_SHARED=1, or ebbtide run --shared. PIDs are those that the processes see
    themselves, which differ in another container.
    """
    place = folder.path()
    entries = folder.Folder(place).fresh_entries() if Path(place).exists() else []
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries], indent=1))
    elif not entries:
        click.echo(f"no process shares a device here: EBBTIDE_SHARED=1 makes one do so ({place})")
    else:
        _print_table(entries)


def _print_table(entries: list[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("PID", "program", "device", "tag"):
        table.add_column(title)
    for title in ("resident", "stored", "waits for"):
        table.add_column(title, justify="right")
    for entry in entries:
        who = (str(entry.pid), entry.program)
        for holding in entry.tags:
            sizes = format_size(holding.resident_bytes), format_size(holding.stored_bytes)
            table.add_row(*who, holding.device[:8], holding.tag, *sizes, "")
        for wait in entry.waits:
            wanted = format_size(wait.wanted_bytes)
            table.add_row(*who, wait.device[:8], ", ".join(wait.tags) or "all", "", "", wanted)
        if not entry.tags and not entry.waits:
            table.add_row(*who)
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _UNBROKEN
    console.print(table)
