"""`ebbtide doctor`."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import click

from ebbtide.cli.diagnosis import Finding, diagnose, is_usable

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


# No path is longer: where lines are not for a screen, none is broken.
_UNBROKEN = 1 << 14


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--all", "is_all", is_flag=True, help="Show the settings at their defaults, too.")
def doctor(is_json: bool, is_all: bool) -> None:
    """Say what is here and whether ebbtide can work with it.

    What is wrong or unusual comes first. Then GPU, driver, torch, Python, what each capability probe said and what to
    do about it, room for backups, preloading, and the settings in force. It works without torch and without a driver.
    The exit status is 0 where regions, pause and resume work, else 1.
    """
    findings = diagnose()
    usable = is_usable(findings)
    if is_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"usable": usable, "findings": rows}, indent=2))
    else:
        _show(findings, usable, is_all)
    sys.exit(0 if usable else 1)


def _show(findings: "list[Finding]", usable: bool, is_all: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNBROKEN)
    unusual = sorted((each for each in findings if each.status != "ok"), key=lambda each: each.status != "problem")
    usual = [each for each in findings if each.status == "ok" and (is_all or not each.is_default)]
    with console.capture() as text:
        console.print(_table(unusual, usual))
    # A table fills its columns with spaces to the end.
    click.echo("\n".join(line.rstrip() for line in text.get().splitlines()))
    defaults = sum(each.is_default for each in findings)
    if defaults and not is_all:
        console.print(f"\n{defaults} settings are at their defaults: `ebbtide doctor --all` shows them")
    console.print()
    if usable:
        console.print("ebbtide works here. Next: `ebbtide demo`", style="green")
    else:
        console.print("ebbtide does not work here yet: each problem above says what to do", style="bold red")


def _table(unusual: "list[Finding]", usual: "list[Finding]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    names = [_name(each, is_unusual) for is_unusual in (True, False) for each in (unusual if is_unusual else usual)]
    table.add_column(no_wrap=True, min_width=max(map(len, names)) + 2)
    table.add_column(no_wrap=True, min_width=max(map(len, _STYLES)))
    table.add_column(overflow="fold")
    heading = ""
    for is_unusual, group in ((True, unusual), (False, usual)):
        for finding in group:
            section = "what is wrong or unusual" if is_unusual else finding.section
            if section != heading:
                heading = section
                table.add_row(Text(f"\n{section}", style="bold"))
            # Text, not markup: what was found may hold brackets.
            text = Text(finding.found)
            if finding.advice:
                text.append(f"\n-> {finding.advice}", style=_STYLES[finding.status])
            status = Text(finding.status, style=_STYLES[finding.status])
            table.add_row(Text(f"  {_name(finding, is_unusual)}"), status, text)
    return table


def _name(finding: "Finding", is_unusual: bool) -> str:
    """With its section, where it stands apart from it."""
    return f"{finding.section}: {finding.name}" if is_unusual else finding.name
