"""One range of torch and Python: the constants, the table of `make matrix`, the pages and pyproject.toml."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from ebbtide.torch_support import versions

ROW = re.compile(r"^\| (\d+\.\d+)[\d.]* \| (CUDA [\d.]+|CPU|) \| (\d+\.\d+)[\d.]* \| (.*) \| [\d-]* \|$", re.MULTILINE)
COUNTS = re.compile(r"^(\d+) passed, 0 failed, \d+ skipped$")


@dataclass(frozen=True)
class TriedRow:
    """One row of the table: "2.6", "CUDA 12.4", "3.13", and whether it was tried and passed."""

    torch: str
    build: str
    python: str
    tests: str

    @property
    def is_untried(self) -> bool:
        return self.tests.startswith("untried")

    @property
    def has_passed(self) -> bool:
        counts = COUNTS.match(self.tests)
        return counts is not None and int(counts[1]) > 300


def read_rows(page: str) -> list[TriedRow]:
    return [TriedRow(*row) for row in ROW.findall(page)]


def all_versions(least: versions.Version, newest: versions.Version) -> set[str]:
    return {f"{least[0]}.{minor}" for minor in range(least[1], newest[1] + 1)}


def find_faults(rows: list[TriedRow]) -> list[str]:
    """The parts of the ranges that the table does not show."""
    passed = [row for row in rows if row.has_passed]
    faults = [
        f"torch {row.torch}, Python {row.python}: {row.tests}" for row in rows if not (row.has_passed or row.is_untried)
    ]
    wanted = all_versions(versions.LEAST_TORCH, versions.NEWEST_TORCH)
    faults += [f"torch {version} is not shown to pass" for version in sorted(wanted - {row.torch for row in passed})]
    faults += [f"torch {row.torch} is tried, and out of the range" for row in passed if row.torch not in wanted]
    wanted = all_versions(versions.LEAST_PYTHON, versions.NEWEST_PYTHON)
    said = {row.python for row in rows if row.has_passed or row.is_untried}  # untried ones are said to be
    faults += [f"Python {version} is not shown to pass" for version in sorted(wanted - said)]
    faults += [f"Python {row.python} is tried, and out of the range" for row in passed if row.python not in wanted]
    return faults


def test_the_table_shows_the_ranges(root: Path) -> None:
    rows = read_rows((root / "docs/support.md").read_text())
    assert find_faults(rows) == []
    assert {row.build.partition(" ")[0] for row in rows} >= {"CUDA"}


def test_the_pages_name_the_ranges(root: Path) -> None:
    sentence = f"torch {versions.TORCH_RANGE}, Python {versions.PYTHON_RANGE}"
    for page in ("README.md", "docs/support.md"):
        assert sentence in (root / page).read_text(), page
    for page in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]:
        ranges = re.findall(r"(torch|Python) (\d\.\d+ to \d\.\d+)", page.read_text())
        known = {("torch", versions.TORCH_RANGE), ("Python", versions.PYTHON_RANGE)}
        assert set(ranges) <= known, page.name


def test_the_package_asks_for_the_least_and_has_no_upper_bound(root: Path) -> None:
    text = (root / "pyproject.toml").read_text()
    assert f'requires-python = ">={versions.format_version(versions.LEAST_PYTHON)}"' in text
    assert f'torch = ["torch>={versions.format_version(versions.LEAST_TORCH)}"]' in text
    classified = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text))
    assert classified == all_versions(versions.LEAST_PYTHON, versions.NEWEST_PYTHON)


# --- the checker, seen to fail ---

GOOD = "| 2.6.0 | CUDA 12.4 | 3.13.0 | 500 passed, 0 failed, 3 skipped | 2026-11-22 |"


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (GOOD, TriedRow("2.6", "CUDA 12.4", "3.13", "500 passed, 0 failed, 3 skipped")),
        (
            "| 2.13.0 |  | 3.14 | untried: no interpreter here |  |",
            TriedRow("2.13", "", "3.14", "untried: no interpreter here"),
        ),
    ],
)
def test_rows_are_read(line: str, row: TriedRow) -> None:
    assert read_rows(f"| torch | build | Python | tests | day |\n|---|---|---|---|---|\n{line}\n") == [row]


@pytest.mark.parametrize(
    ("tests", "fault"),
    [
        ("500 passed, 1 failed (a::b), 3 skipped", "Python 3.13: 500 passed, 1 failed"),
        ("2 passed, 0 failed, 400 skipped", "Python 3.13: 2 passed"),
        ("0 passed, 1 failed, 0 skipped; the first region failed", "the first region failed"),
        ("untried: no such wheel", "torch 2.6 is not shown to pass"),
        ("500 passed, 0 failed, 3 skipped", "torch 2.7 is not shown to pass"),
    ],
)
def test_a_planted_fault_is_found(tests: str, fault: str) -> None:
    assert any(fault in one for one in find_faults([TriedRow("2.6", "CPU", "3.13", tests)]))


def test_a_version_beyond_the_range_is_found() -> None:
    rows = [TriedRow("2.99", "CPU", "3.99", "500 passed, 0 failed, 3 skipped")]
    assert {"torch 2.99 is tried, and out of the range", "Python 3.99 is tried, and out of the range"} <= set(
        find_faults(rows)
    )
