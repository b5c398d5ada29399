"""`ebbtide doctor`."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ebbtide.diagnosis import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print the findings as JSON.")
def doctor(is_json: bool) -> None:
    """Say what is here and whether ebbtide can work with it.

    GPU, driver, torch, Python, what each capability probe said and what to do about it, room for backups, preloading,
    and the settings in force. It works without torch and without a driver. The exit status is 0 where regions, pause
    and resume work, else 1.
    """
    from ebbtide.diagnosis import diagnose, is_usable

    findings = diagnose()
    usable = is_usable(findings)
    if is_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"usable": usable, "findings": rows}, indent=2))
    else:
        _show(findings, usable)
    sys.exit(0 if usable else 1)


def _show(findings: "list[Finding]", usable: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=max(len(finding.name) for finding in findings) + 2)
    table.add_column(no_wrap=True, min_width=max(map(len, _STYLES)))
    table.add_column(overflow="fold")
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            table.add_row(Text(f"\n{section}", style="bold"))
        # Text, not markup: what was found may hold brackets.
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", style=_STYLES[finding.status])
        table.add_row(Text(f"  {finding.name}"), Text(finding.status, style=_STYLES[finding.status]), text)
    console = Console(highlight=False)
    console.print(table)
    console.print()
    if usable:
        console.print("ebbtide works here. Next: `ebbtide demo`", style="green")
    else:
        console.print("ebbtide does not work here yet: each problem above says what to do", style="bold red")
