"""Prose wraps at 120 columns: Markdown, comments and docstrings. Formatters hold the code itself."""

from pathlib import Path

import pytest
from checks.widths import MAX_COLUMNS, find_wide_lines

CHECKED = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CMakeLists.txt"),
    *("benchmarks", "cmake", "csrc", "docs", "examples", "python", "tests", "tools"),
)


def test_prose_is_wrapped(root: Path) -> None:
    faults = find_wide_lines(root, CHECKED)
    assert not faults, "\n".join(faults)


# --- the finder, seen to find ---

LONG = "x " * (MAX_COLUMNS // 2) + "x"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.md", f"{LONG}\n"),
        ("a.md", f"```sh\nmake\n```\n- {LONG}\n"),
        ("a.cpp", f"// {LONG}\n"),
        ("a.h", f"int a; /* short\n {LONG}\n*/\n"),
        ("a.h", f'const char* a = "/*";\n/* {LONG} */\n'),
        ("a.def", f"X(a)  // {LONG}\n"),
        ("a.py", f"# {LONG}\n"),
        ("a.py", f'def f():\n    """Short.\n\n    {LONG}\n    """\n'),
        ("a.sh", f"run  # {LONG}\n"),
        ("CMakeLists.txt", f"# {LONG}\n"),
    ],
)
def test_a_planted_wide_line_is_found(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text.replace(LONG, "short"))
    assert find_wide_lines(tmp_path, [file]) == []
    (tmp_path / file).write_text(text)
    assert len(find_wide_lines(tmp_path, ["."] if file == "a.py" else [file])) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.md", f"| {LONG} |\n"),
        ("a.md", f"```text\n{LONG}\n```\n"),
        ("a.md", f"See https://example.org/{'x' * MAX_COLUMNS} for more.\n"),
        ("a.cpp", f'const char* a = "{LONG} // no comment";\n'),
        ("a.cpp", f"/* short */ \n{LONG};\n"),
        ("a.py", f'text = "{LONG}"\n'),
        ("a.sh", f"echo {LONG}\n"),
    ],
)
def test_other_lines_than_prose_may_be_wide(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    assert find_wide_lines(tmp_path, [file]) == []


def test_a_place_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.md"):
        find_wide_lines(tmp_path, ["gone.md"])
