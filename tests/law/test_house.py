"""The drawings of the two READMEs of the sources show the tables that the sources are held against."""

import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "tools/draw_house.py"))


@pytest.mark.parametrize("readme", ["csrc/README.md", "python/README.md"])
def test_the_drawing_shows_the_table(root: Path, tool: dict[str, Any], readme: str) -> None:
    text = (root / readme).read_text()
    drawing = tool["HOUSES"][readme]
    assert (root / drawing).read_text() == tool["draw"](text), "run tools/draw_house.py"
    assert f"](../{drawing})" in text
    assert len(tool["read_table"](text)) > 10


TABLE = "| `low/` | | |\n| `high/` | | `low/` `beside/x.h` |\n| `beside/` | | |\n| `all/` | | `high/` |\n"


def test_a_folder_stands_above_the_folders_that_it_uses(tool: dict[str, Any]) -> None:
    assert tool["levels_of"](tool["read_table"](TABLE)) == [["low/", "beside/"], ["high/"], ["all/"]]


def test_a_changed_table_changes_the_drawing(tool: dict[str, Any]) -> None:
    assert tool["draw"](TABLE) != tool["draw"](TABLE.replace("`high/` |\n", "`low/` |\n"))
