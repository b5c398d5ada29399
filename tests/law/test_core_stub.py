"""python/ebbtide/_core.pyi has the names of the built _core, and Python's reports have the sizes of ebbtide.h."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROW = re.compile(r"^typedef struct ebbtide_report_row \{(.*?)^\}", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"^  [\w* ]*\b(\w+);", re.MULTILINE)


def public_names(names: Iterator[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def stub_names(body: list[ast.stmt]) -> Iterator[str]:
    """What these statements of a stub declare."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)


def find_differences(stub: str, module: object) -> dict[str, set[str]]:
    """The public names that the stub or the module alone has, by class; those outside classes under ""."""
    tree = ast.parse(stub)
    bodies = {"": tree.body, **{node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}}
    found = {}
    for name, body in bodies.items():
        built = vars(getattr(module, name, object) if name else module)
        found[name] = public_names(stub_names(body)) ^ public_names(iter(built))
    return {name: names for name, names in found.items() if names}


def read_row(header: str) -> list[str]:
    """The members of ebbtide_report_row, in order."""
    (members,) = ROW.findall(header)
    return MEMBER.findall(members)


def test_the_stub_has_the_names_of_the_module(root: Path) -> None:
    from ebbtide import _core

    assert find_differences((root / "python/ebbtide/_core.pyi").read_text(), _core) == {}


def test_reports_have_the_sizes_of_the_header(root: Path) -> None:
    from ebbtide.saver import Report, ReportRow

    row = read_row((root / "csrc/api/ebbtide.h").read_text())
    assert list(ReportRow.__dataclass_fields__) == row
    assert [name for name in Report.__dataclass_fields__ if name in row] == row[2:], "all but tag and device"


# --- the finders, seen to find ---


@pytest.mark.parametrize(
    ("line", "planted", "found"),
    [
        ("    ahead_bytes: int\n", "", {"TagInfo": {"ahead_bytes"}}),
        ("    constant: int\n", "    constnt: int\n", {"Report": {"constant", "constnt"}}),
        ("def stats() -> dict[str, int]: ...\n", "", {"": {"stats"}}),
        (
            "class Operation:\n",
            "class Operations:\n",
            {"": {"Operation", "Operations"}, "Operations": {"commit", "abandon"}},
        ),
    ],
)
def test_a_planted_difference_is_found(root: Path, line: str, planted: str, found: dict[str, set[str]]) -> None:
    from ebbtide import _core

    stub = (root / "python/ebbtide/_core.pyi").read_text()
    assert stub.count(line) == 1
    assert find_differences(stub.replace(line, planted), _core) == found


def test_members_are_read_in_order() -> None:
    text = "typedef struct ebbtide_report_row {\n  const char* a; /* b; */\n  /* c; */\n  long b;\n}\n"
    assert read_row(text) == ["a", "b"]
