"""tools/matrix.py: which rows there are, what is tried again, and what the table says."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ebbtide.torch_support import versions

ALL = {python: Path(f"/{python}") for python in ("3.10", "3.11", "3.12", "3.13", "3.14")}
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure message="x"/></testcase>
<testcase classname="b" name="three"><error message="y"/></testcase>
<testcase classname="b" name="four"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""
TABLE = """
| torch | build | Python | tests | day |
|---|---|---|---|---|
| 2.7.1 | CUDA 12.6 | 3.13.0 | as it was | 2026-01-01 |
"""


@pytest.fixture
def matrix(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a folder of its own."""
    spec = importlib.util.spec_from_file_location("matrix", root / "tools/matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(root / "tools")
    monkeypatch.setitem(sys.modules, "matrix", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WORK", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "support.md")
    module.PAGE.write_text(f"before\n{module.BEGIN}\n{TABLE}\n{module.END}\nafter\n")
    return module


def test_the_rows_cover_what_is_supported(matrix: ModuleType) -> None:
    rows = matrix.choose_rows(ALL)
    torches = {versions.torch_version(row.torch) for row in rows}
    assert torches == {(2, minor) for minor in range(versions.LEAST_TORCH[1], versions.NEWEST_TORCH[1] + 1)}
    with_one = {row.python for row in rows if row.torch == matrix.TORCH_OF_EVERY_PYTHON}
    assert with_one == set(ALL)
    assert len(set(rows)) == len(rows)
    assert matrix.Row("2.15.0", "3.14") in rows and matrix.Row("2.8.0", "3.13") in rows


def test_large_model_support_is_tried_where_it_works(matrix: ModuleType) -> None:
    for row in matrix.choose_rows(ALL):
        works = not versions.lms_problem(versions.torch_version(row.torch))
        assert ("test_lms.py" in matrix.patterns_of(row)) == works
    assert all((Path(__file__).parents[1] / "python" / name).is_file() for name in matrix.LMS_TESTS)


def test_a_python_that_is_not_here_is_a_row_that_says_so(matrix: ModuleType) -> None:
    here = {python: path for python, path in ALL.items() if python != "3.14"}
    rows = matrix.choose_rows(here)
    assert matrix.Row("2.15.0", "3.13") in rows
    row = matrix.Row(matrix.TORCH_OF_EVERY_PYTHON, "3.14")
    assert row in rows
    result = matrix.try_row(row, here, "key", None)
    assert matrix.describe(result) == "untried: no interpreter here"


def test_interpreters_are_those_that_can_build(matrix: ModuleType, tmp_path: Path) -> None:
    interpreters = sys.modules["interpreters"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert interpreters.is_usable(Path(sys.executable), version)
    assert not interpreters.is_usable(Path(sys.executable), "3.9")
    assert not interpreters.is_usable(tmp_path / "python", version)
    assert interpreters.find_interpreters([version], [sys.executable])[version] == Path(sys.executable)


def test_the_report_is_counted(matrix: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    result = matrix.Result("2.6.0", "3.13", "key")
    matrix.read_report(report, result)
    assert (result.passed, result.failed, result.skipped) == (1, 2, 1)
    assert matrix.describe(result) == "1 passed, 2 failed (a::two, b::three), 1 skipped"


@pytest.fixture
def run_main(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """`main` over rows that a function tries; the exit status and the rows that were tried."""

    def run(*arguments: str, sources: str = "key", answer: Any = None) -> tuple[int, list[str]]:
        tried = []

        def try_row(row: Any, interpreters: Any, sources: str, options: Any) -> Any:
            tried.append(row.name)
            result = matrix.Result(row.torch, row.python, sources, passed=500, cuda="13.0", installed_torch="x")
            return answer(row, result) if answer else result

        monkeypatch.setattr(sys, "argv", ["matrix.py", *arguments])
        monkeypatch.setattr(matrix, "find_interpreters", lambda *_: ALL)
        monkeypatch.setattr(matrix, "copy_sources", lambda: sources)
        monkeypatch.setattr(matrix, "try_row", try_row)
        monkeypatch.setattr(matrix, "ROOT", matrix.WORK)
        return matrix.main(), tried

    return run


def test_what_has_a_result_is_not_tried_again(matrix: ModuleType, run_main: Callable[..., Any]) -> None:
    every = [row.name for row in matrix.choose_rows(ALL)]
    assert run_main("--list") == (0, [])
    assert run_main("--rows", "2.6.0,py3.10") == (0, ["torch-2.6.0-py3.13", "torch-2.13.0-py3.10"])
    page = matrix.PAGE.read_text()
    assert page.count("| 500 passed, 0 failed, 0 skipped |") == 2, "the others keep what was known, if anything was"
    assert "| 2.7.1 | CUDA 12.6 | 3.13.0 | as it was | 2026-01-01 |\n" in page
    assert page.count("| untried: not run yet |") == len(every) - 3
    assert run_main() == (0, [name for name in every if name not in ("torch-2.6.0-py3.13", "torch-2.13.0-py3.10")])
    page = matrix.PAGE.read_text()
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "as it was" not in page
    assert page.count("| 500 passed, 0 failed, 0 skipped |") == len(every)
    assert run_main() == (0, [])
    assert run_main("--rows", "2.7.1", "--again") == (0, ["torch-2.7.1-py3.13"])
    assert run_main("--rows", "2.7.1", sources="changed") == (0, ["torch-2.7.1-py3.13"])


def test_what_could_not_be_set_up_has_no_result(matrix: ModuleType, run_main: Callable[..., Any]) -> None:
    def fail(row: Any, result: Any) -> Any:
        raise matrix.SetupError("no network")

    assert run_main("--rows", "2.6.0", answer=fail) == (1, ["torch-2.6.0-py3.13"])
    assert run_main("--rows", "2.6.0") == (0, ["torch-2.6.0-py3.13"])


def test_a_row_that_fails_is_in_the_table_and_in_the_status(matrix: ModuleType, run_main: Callable[..., Any]) -> None:
    def fail_one(row: Any, result: Any) -> Any:
        result.failed, result.failures = (1, ["a::b"]) if row.torch == "2.6.0" else (0, [])
        return result

    assert run_main(answer=fail_one)[0] == 1
    assert "| 500 passed, 1 failed (a::b), 0 skipped |" in matrix.PAGE.read_text()
    assert run_main()[0] == 1, "also when it is not tried again"
