"""`ebbtide doctor`."""

import dataclasses
import json
import sys

import click

from ebbtide.cli.diagnosis import Finding, diagnose, is_usable

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


# Longer than any path: lines that are not for a screen are not broken.
_UNBROKEN = 1 << 14


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--all", "is_all", is_flag=True, help="Show the settings at their defaults, too.")
def doctor(is_json: bool, is_all: bool) -> None:
    """Check this machine: say whether ebbtide can work with it.

    Problems and unusual findings come first. Then GPU, driver, torch, Python, the answer of each capability probe with
    advice, room for backups, preloading, and the settings in force. It works without torch and without a driver.
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
    from rich.table import Table
    from rich.text import Text

    unusual = sorted((each for each in findings if each.status != "ok"), key=lambda each: each.status != "problem")
    usual = [each for each in findings if each.status == "ok" and (is_all or not each.is_default)]
    rows = [("problems and unusual findings", f"  {each.section}: {each.name}", each) for each in unusual]
    rows += [(each.section, f"  {each.name}", each) for each in usual]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=max(len(name) for _, name, _ in rows))
    table.add_column(no_wrap=True, min_width=max(map(len, _STYLES)))
    table.add_column(overflow="fold")
    before = ""
    for section, name, finding in rows:
        if section != before:
            table.add_row(Text(f"\n{section}", style="bold"))
            before = section
        # Text, not markup: a finding may hold brackets.
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", style=_STYLES[finding.status])
        table.add_row(Text(name), Text(finding.status, style=_STYLES[finding.status]), text)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNBROKEN)
    with console.capture() as text_of_table:
        console.print(table)
    # A table fills its columns with spaces to the end.
    click.echo("\n".join(line.rstrip() for line in text_of_table.get().splitlines()))
    defaults = sum(each.is_default for each in findings)
    if defaults and not is_all:
        console.print(f"\n{defaults} settings are at their defaults: `ebbtide doctor --all` shows them")
    console.print()
    if usable:
        console.print("ebbtide works here. Next: `ebbtide demo`", style="green")
    else:
        console.print("ebbtide does not work here yet: each problem above says what to do", style="bold red")
