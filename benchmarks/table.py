"""The result as tables for people."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import provenance
from benchmarks.goals import Entries

WIDTH = 190
HOW_TO_READ = (
    "A ratio with >= says how many times as fast as the limit, one with <= how many times its time. L: a copy of the "
    "same bytes between pinned memory and the device. D: the bare driver calls, at the handle size that is best for "
    "them. T: torch_memory_saver. All are of this run."
)
OTHER_RUN = "*: measured in another run than the figure, maybe on another machine of the kind: no more than a hint."
STYLES = {"failed": "red", "wrong": "red", "skipped": "yellow", "left out": "yellow"}


def format_seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            break
    return f"{seconds * factor:.4g} {unit}"


def format_spread(summary: dict[str, float]) -> tuple[str, str]:
    """Least to most, and the width of the middle half."""
    span = f"{format_seconds(summary['least'])} .. {format_seconds(summary['most'])}"
    return span, format_seconds(summary["three_quarters"] - summary["quarter"])


def format_rate(bytes_per_second: float | None) -> str:
    return f"{bytes_per_second / 1e9:.4g}" if bytes_per_second else ""


def format_goal(goal: dict[str, Any]) -> tuple[str, str, str, str]:
    """The limit, the ratio, the target, and whether it is reached."""
    limit = f" ({format_seconds(goal['limit_seconds'])})" if goal["limit_seconds"] else ""
    ratio = "no figure" if goal["ratio"] is None else f"{goal['ratio']:.3g}"
    target = "" if goal["target"] is None else f"{goal['relation']} {goal['target']:g}"
    if goal["is_stretch"]:
        target += " stretch"
    verdict = {None: "", True: "[green]reached[/]", False: "[red]missed[/]"}[goal["reached"]]
    mark = "*" if goal.get("is_other_run") else ""
    return goal["against"] + mark + limit, ratio, target, verdict


def show_status(status: str) -> str:
    return f"[{STYLES[status]}]{status}[/]"


def make_rows_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="pause and resume", title_justify="left")
    table.add_column("workload", max_width=34)
    table.add_column("who")
    for name in ("median", "least .. most", "middle half", "n", "GB/s", "CPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("against", "ratio", "target", ""):
        table.add_column(name)
    for row in rows:
        if "seconds" not in row:
            table.add_row(row["workload"], row["who"], show_status(row["status"]), *[""] * 9)
            continue
        summary = row["seconds"]
        figures = [format_seconds(summary["median"]), *format_spread(summary), str(summary["count"])]
        cpu = "" if row["cpu_seconds"] is None else format_seconds(row["cpu_seconds"])
        wrong = [("" if row["status"] == "ok" else show_status(row["status"]), "", "", "")]
        first, *others = [format_goal(goal) for goal in row["goals"]] or wrong
        table.add_row(row["workload"], row["who"], *figures, format_rate(row["bytes_per_second"]), cpu, *first)
        for goal in others:
            table.add_row(*[""] * 8, *goal)
    return table


def make_limits_table(entries: Entries) -> Table:
    table = Table(title="limits of this machine", title_justify="left")
    table.add_column("limit")
    table.add_column("metric")
    for name in ("bytes", "median", "least .. most", "middle half", "n", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, entry in entries.items():
        if not name.startswith("limits."):
            continue
        if entry["status"] != "ok":
            table.add_row(name, show_status(entry["status"]), *[""] * 6)
        for metric, values in entry.get("seconds", {}).items():
            summary = provenance.summarize(values)
            moved = entry["bytes"] * (2 if metric == "both" else 1)
            figures = [format_seconds(summary["median"]), *format_spread(summary), str(summary["count"])]
            table.add_row(name, metric, f"{moved:,}", *figures, format_rate(moved / summary["median"]))
    return table


def make_facts_table(entries: Entries) -> Table:
    table = Table(title="facts beside the figures", title_justify="left")
    for name in ("part", "fact", "value"):
        table.add_column(name)
    for part, entry in entries.items():
        for name, value in entry.get("facts", {}).items():
            is_count = isinstance(value, int) and not isinstance(value, bool)
            table.add_row(part, name, f"{value:,}" if is_count else escape(str(value)))
    return table


def show(document: dict[str, Any]) -> None:
    """Prints what `run` of __main__.py wrote."""
    result = document["result"]
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for table in (
        make_limits_table(result["measured"]),
        make_rows_table(result["rows"]),
        make_facts_table(result["measured"]),
    ):
        console.print(table)
    for part, entry in result["measured"].items():
        if entry["status"] in ("skipped", "left out"):
            console.print(f"left out: {part}: {escape(entry['reason'])}")
    console.print(HOW_TO_READ)
    if any(goal.get("is_other_run") for row in result["rows"] for goal in row["goals"]):
        console.print(OTHER_RUN)
