"""Draws the layers of csrc/README.md and the rooms of python/README.md, from the tables that tests hold the sources
against. tests/law/test_house.py compares the drawings with the tables."""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOUSES = {"csrc/README.md": "docs/images/csrc.svg", "python/README.md": "docs/images/python.svg"}
_ROW = re.compile(r"^\| `([\w./]*(?:/|\.py))` \|[^|]*\|([^|]*)\|$", re.MULTILINE)
_WIDTH, _HEIGHT, _GAP, _MARGIN = 900, 30, 8, 12
_LETTER = 7.2  # of the monospaced font, at 12 pixels


def read_table(readme: str) -> dict[str, set[str]]:
    """Each folder, and the folders that it may use."""
    rows = {name: set(re.findall(r"`([^`]+)`", allowed)) for name, allowed in _ROW.findall(readme)}
    meant = {name: {each for entry in allowed for each in _meant(entry, rows)} for name, allowed in rows.items()}
    return {name: allowed - {name} for name, allowed in meant.items()}


def _meant(entry: str, rows: dict[str, set[str]]) -> Iterator[str]:
    """The rows that an entry of the last column stands for: one, those below a folder, or that of a file."""
    if entry in rows:
        yield entry
    elif entry.endswith("/"):
        yield from (name for name in rows if name.startswith(entry))
    else:
        folder = f"{entry.rpartition('/')[0]}/"
        yield from (name for name in rows if name == folder)


def levels_of(table: dict[str, set[str]]) -> list[list[str]]:
    """The folders by the length of the longest way down, the lowest first."""
    height: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in height:
            height[name] = 1 + max(map(measure, table[name]), default=-1)
        return height[name]

    for name in table:
        measure(name)
    return [[name for name in table if height[name] == level] for level in range(max(height.values()) + 1)]


def draw(readme: str) -> str:
    """The house as SVG: a folder uses folders further down alone."""
    lines = [line for level in levels_of(read_table(readme)) for line in _broken(level)]
    total = len(lines) * (_HEIGHT + _GAP) + 2 * _MARGIN
    boxes = []
    for number, line in enumerate(lines):
        y = total - _MARGIN - (number + 1) * (_HEIGHT + _GAP) + _GAP
        free = _WIDTH - 2 * _MARGIN - _GAP * (len(line) - 1) - sum(map(_needs, line))
        x = float(_MARGIN)
        for name in line:
            width = _needs(name) + free / len(line)
            boxes.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{_HEIGHT}" rx="4"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 20}">{escape(name)}</text>'
            )
            x += width + _GAP
    style = "rect{fill:#eceff1;stroke:#607d8b}text{font:12px monospace;text-anchor:middle;fill:#263238}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}">'
    return "\n".join([head, f"<style>{style}</style>", *boxes, "</svg>", ""])


def _needs(name: str) -> float:
    return len(name) * _LETTER + 10


def _broken(level: list[str]) -> Iterator[list[str]]:
    """The folders of one level, in as many lines as they need."""
    line: list[str] = []
    for name in level:
        if line and sum(_needs(each) + _GAP for each in [*line, name]) > _WIDTH - 2 * _MARGIN:
            yield line
            line = []
        line.append(name)
    yield line


if __name__ == "__main__":
    for readme, drawing in HOUSES.items():
        (ROOT / drawing).write_text(draw((ROOT / readme).read_text()))
