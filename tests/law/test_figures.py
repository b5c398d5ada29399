"""The figures of README.md and docs/performance.md are those of the newest result files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages

ENTRIES: dict[str, dict[str, Any]] = json.loads((pages.HERE / "figures.json").read_text())


def parts_of(entry: dict[str, Any]) -> set[str]:
    sources = [each for source in entry["sources"] for each in source.split(" / ") if each != "-"]
    return {source.split(" ")[0] for source in sources}


def day_of(document: dict[str, Any]) -> str:
    origin = document["provenance"]
    return max(run["when"] for run in origin.get("runs", [origin]))


def newest_with(parts: set[str]) -> str:
    """The newest result file that has all of these parts."""
    documents = {path.name: json.loads(path.read_text()) for path in (pages.HERE / "results").glob("*.json")}
    able = {
        name: day_of(document)
        for name, document in documents.items()
        if parts <= {part for part, each in document["result"].get("measured", {}).items() if each["status"] == "ok"}
    }
    return max(able, key=lambda name: able[name])


@pytest.mark.parametrize("name", pages.PAGES)
def test_the_figures_of_the_page_are_those_of_the_results(root: Path, name: str) -> None:
    page = (root / name).read_text()
    assert page == pages.write_figures(page), "run python -m benchmarks pages"


@pytest.mark.parametrize("name", pages.PAGES)
def test_every_time_and_rate_of_the_page_is_marked(root: Path, name: str) -> None:
    assert pages.find_unmarked((root / name).read_text()) == []


@pytest.mark.parametrize("name", ENTRIES)
def test_the_result_is_the_newest_that_has_these_figures(name: str) -> None:
    assert ENTRIES[name]["result"] == newest_with(parts_of(ENTRIES[name])), "change figures.json, and run its tool"


def test_every_entry_is_used(root: Path) -> None:
    text = "".join((root / name).read_text() for name in pages.PAGES)
    assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == {*ENTRIES, "none"}


# --- the checks, seen to fail ---


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("**0.015 s**", "**0.008 s**"),
        ("| 260 ms | 297 ms | 369 ms |", "| 260 ms | 297 ms | 370 ms |"),
        ("| 239 ms, 34.7 GB |", "| 239 ms, 34.6 GB |"),
        ("1.0 and 3.1 ms", "0.9 and 3.1 ms"),
    ],
)
def test_a_changed_figure_is_found(root: Path, old: str, new: str) -> None:
    page = (root / "README.md").read_text()
    assert page.count(old) == 1
    assert pages.write_figures(page.replace(old, new)) == page


def test_a_figure_too_many_is_found(root: Path) -> None:
    page = (root / "README.md").read_text()
    with pytest.raises(ValueError, match="sources for the"):
        pages.write_figures(page.replace("**0.015 s**", "**0.015 s**, once 0.008 s"))


def test_an_unmarked_figure_is_found() -> None:
    marked = "<!-- figures: none -->\n\nIt took 3 ms once.\n"
    assert pages.find_unmarked(marked) == []
    assert pages.find_unmarked(f"{marked}\nA pause takes 15 ms.\n") == ["A pause takes 15 ms.\n"]
    assert pages.find_unmarked(f"{marked}\n| 55 GB/s |\n") == ["| 55 GB/s |\n"]
