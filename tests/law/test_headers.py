"""Headers bring no names into the global namespace, and sources none that they do not use.

clang-tidy can't tell: its units include sources as if they were headers.
"""

import re
from pathlib import Path

import pytest

USING = re.compile(r"^using [^=]*;")  # a type of its own is no name from elsewhere


def find_global_names(path: Path) -> list[str]:
    """The lines of a header that use a namespace or a name of one, where no namespace is open."""
    depth, found = 0, []
    for line in path.read_text().splitlines():
        if depth == 0 and USING.match(line):
            found.append(line)
        depth += len(re.findall(r"^(?:inline )?namespace\b.*\{$", line)) - len(re.findall(r"^\}  // namespace", line))
    return found


def test_no_header_brings_names_into_the_global_namespace(root: Path) -> None:
    headers = sorted((root / "csrc").rglob("*.h"))
    assert len(headers) > 50
    assert {str(path): found for path in headers if (found := find_global_names(path))} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("using namespace ebbtide;\n", 1),
        ("#pragma once\nusing std::vector;\n", 1),
        ("using Result = int;\n", 0),
        ("namespace ebbtide {\nusing Bytes = int;\n}  // namespace ebbtide\n", 0),
        ("namespace a {\nnamespace b {\n}  // namespace b\nusing a::C;\n}  // namespace a\nusing a::D;\n", 1),
    ],
)
def test_a_planted_one_is_found(tmp_path: Path, text: str, count: int) -> None:
    header = tmp_path / "a.h"
    header.write_text(text)
    assert len(find_global_names(header)) == count


DECLARATION = re.compile(r"^ *using (?:\w+::)+(\w+);", re.MULTILINE)


def find_unused_names(text: str) -> list[str]:
    """Those of using-declarations that occur nowhere else."""
    return [name for name in DECLARATION.findall(text) if len(re.findall(rf"\b{name}\b", text)) < 2]


def test_no_source_uses_a_name_in_vain(root: Path) -> None:
    sources = sorted(path for path in (root / "csrc").rglob("*") if path.suffix in (".cpp", ".h"))
    assert sum(len(DECLARATION.findall(path.read_text())) for path in sources) > 5
    assert {str(path): found for path in sources if (found := find_unused_names(path.read_text()))} == {}


def test_a_planted_name_in_vain_is_found() -> None:
    assert find_unused_names("using a::b::Used;\nusing a::Vain;\nUsed used;\n") == ["Vain"]


STREAM = re.compile(r"^#include <(?:(?:[io]|io)?[fs]?stream|iomanip)>", re.MULTILINE)


def test_no_source_of_the_torch_extension_uses_streams(root: Path) -> None:
    """Some compilers link their own C++ library into it. Its streams look into the program's locale then, and crash."""
    sources = sorted(path for path in (root / "csrc" / "torch").rglob("*") if path.suffix in (".cpp", ".h"))
    assert len(sources) > 20
    assert [str(path) for path in sources if STREAM.search(path.read_text())] == []


@pytest.mark.parametrize("name", ["sstream", "iostream", "ostream", "fstream", "iomanip"])
def test_a_planted_stream_is_found(name: str) -> None:
    assert STREAM.search(f"#include <string>\n#include <{name}>\n")
