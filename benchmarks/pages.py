"""Figures of the pages, written from result files.

A comment before a table or a paragraph, `<!-- figures: NAME -->`, names an entry of figures.json: the result file, and
the source of each figure in reading order. A figure is a number with one of the units of UNITS. An entry's "unit" is
that of the numbers of a table that have none, but in its head and first column. A source is one of

    PART METRIC             the median of its times; with GB/s the part's bytes in that time
    PART METRIC : least     or most
    PART METRIC @ LIMIT     its ratio to a limit of the same run
    PART # FACT             a fact beside the figures
    SOURCE / SOURCE         their quotient
    -                       a number that is in no result

`<!-- figures: none -->` marks figures that are in no result file; the text says so.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = ("README.md", "docs/performance.md")
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "GB/s": 1e-9, "GB": 1e-9, "%": 100.0, "times": 1.0}
_UNIT = r"(?:GB/s|GB|ms|us|s|%|times)(?![\w/])"
_MARK = re.compile(r"^<!-- figures: (?P<name>\w+) -->\n\n", re.MULTILINE)
_NUMBER = r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w,.]*\d)"
# "294 / 296 ms" and "431 to 462 ms" are two figures with one unit.
_FIGURE = re.compile(rf"{_NUMBER}(?=(?:(?: / | to | and |, ){_NUMBER})*\)? ?\**(?P<unit>{_UNIT}))")
_BARE = re.compile(_NUMBER)


def write_figures(page: str) -> str:
    """The page with every marked figure as its result has it, in the decimals that it has on the page."""
    entries = json.loads((HERE / "figures.json").read_text())
    parts, end = [], 0
    for mark in _MARK.finditer(page):
        if mark["name"] == "none":
            continue
        block_end = page.find("\n\n", mark.end())
        block = page[mark.end() : len(page) if block_end < 0 else block_end]
        parts += [page[end : mark.end()], _write_block(block, entries[mark["name"]])]
        end = mark.end() + len(block)
    return "".join([*parts, page[end:]])


def find_unmarked(page: str) -> list[str]:
    """Paragraphs and tables with a time or a rate, and without a mark."""
    blocks = re.split(r"\n\n", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    found = []
    for before, block in zip(["", *blocks], blocks, strict=False):
        is_marked = before.lstrip().startswith("<!-- figures") or block.lstrip().startswith("<!-- figures")
        if not is_marked and any(match["unit"] not in ("%", "GB") for match in _FIGURE.finditer(block)):
            found.append(block)
    return found


def _write_block(block: str, entry: dict[str, Any]) -> str:
    result = json.loads((HERE / "results" / entry["result"]).read_text())["result"]
    sources = entry["sources"]
    figures = list(_figures(block, entry.get("unit")))
    if len(figures) != len(sources):
        shown = ", ".join(block[start:stop] for start, stop, _ in figures)
        raise ValueError(f"{len(sources)} sources for the {len(figures)} figures {shown}")
    for (start, stop, unit), source in reversed(list(zip(figures, sources, strict=True))):
        if source == "-":
            continue
        decimals = len(block[start:stop].partition(".")[2])
        text = f"{_value(result, source, unit) * UNITS[unit]:,.{decimals}f}"
        block = block[:start] + text + block[stop:]
    return block


def _figures(block: str, unit: str | None) -> Iterator[tuple[int, int, str]]:
    """Where each figure begins and ends, and its unit."""
    with_unit = {match.span(): match["unit"] for match in _FIGURE.finditer(block)}
    if unit is not None:
        body = block.index("\n", block.index("\n|--")) if "\n|--" in block else 0
        first_columns = [match.span() for match in re.finditer(r"^\|[^|]*\|", block, re.MULTILINE)]
        for match in _BARE.finditer(block, body):
            if not any(start <= match.start() < stop for start, stop in first_columns):
                with_unit.setdefault(match.span(), unit)
    yield from ((*span, with_unit[span]) for span in sorted(with_unit))


def _value(result: dict[str, Any], source: str, unit: str) -> float:
    if " / " in source:
        above, below = source.split(" / ")
        return _value(result, above, "s") / _value(result, below, "s")
    if " # " in source:
        part, fact = source.split(" # ")
        return float(result["measured"][part]["facts"][fact])
    if " @ " in source:
        figure, limit = source.split(" @ ")
        part, metric = figure.split(" ", 1)
        (row,) = (row for row in result["rows"] if (row["part"], row["metric"]) == (part, metric))
        return float(next(goal["ratio"] for goal in row["goals"] if goal["against"] == limit))
    figure, _, statistic = source.partition(" : ")
    part, metric = figure.split(" ", 1)
    entry = result["measured"][part]
    statistics_by_name: dict[str, Callable[[list[float]], float]] = {"": statistics.median, "least": min, "most": max}
    seconds = statistics_by_name[statistic](entry["seconds"][metric])
    if unit != "GB/s":
        return seconds
    return float(entry["bytes"] * (2 if metric == "both" else 1) / seconds)
