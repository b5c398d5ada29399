"""tools/mutants: what it changes, what it draws, and that it tells the killed from the survivors on a toy tree."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.mutants import plan
from tools.mutants.__main__ import EQUIVALENTS, main
from tools.mutants.operators import find_mutations
from tools.mutants.report import Equivalents
from tools.mutants.sample import Sample, collect, find_rooms
from tools.mutants.workbench import Workbench


def changed(line: str) -> set[str]:
    """What becomes of a line, mutant by mutant."""
    return {mutation.apply(line) for mutation in find_mutations("csrc/room/a.cpp", line)}


@pytest.mark.parametrize(
    ("line", "mutants"),
    [
        ("bool f() { return a < b; }", {"bool f() { return a <= b; }", "bool f() { return {}; }"}),
        ("x = a && !b;\nf();", {"x = a || !b;\nf();", "x = a && b;\nf();", "x = a && !b;\nstatic_cast<void>(0);"}),
        ("if (a) b(); else c();", {"if (!(a)) b(); else c();", "if (a) static_cast<void>(0); else c();",
                                   "if (a) b(); if (false) c();", "if (a) b(); else static_cast<void>(0);"}),
        ("if (int n = 1; n) {}", {"if (int n = 2; n) {}", "if (int n = 0; n) {}", "if (int n = 1; !(n)) {}"}),
        ("{ const std::lock_guard lock(m); }", {"{ static_cast<void>(0); }"}),
        ("void f() { g(); }", {"void f() { return; g(); }", "void f() { static_cast<void>(0); }"}),
        ("{ throw Error(text); }", {"{ static_cast<void>(0); }"}),
        ("{ a->b = c; }", {"{ static_cast<void>(0); }"}),
        ("return true;", {"return false;"}),
        ("++count", {"--count"}),
        # Neither brackets of templates, references, comments, strings, assertions nor capacity.
        ("std::vector<int>&& v; // a < b\n/* 1 */ auto s = \"1 < 2\"; static_assert(a < 1);", set()),
        ("#if A < 1\n", set()),
        ("{ v.reserve(n); }", set()),
        ("{ Type name(argument); }", set()),
        ("{ std::string name = other; std::vector<int> many(argument); }", set()),
        ("return nullptr;", set()),
    ],
)  # fmt: skip
def test_the_mutants_of_a_line(line: str, mutants: set[str]) -> None:
    assert changed(line) == mutants


def test_a_diff_is_the_same_wherever_the_line_stands() -> None:
    sources = ["return a < b;\n", "\n\n    return a  <  b;\n"]
    diffs = [find_mutations("csrc/room/a.cpp", source)[-1].diff(source) for source in sources]
    assert diffs[0] == diffs[1] == ["- return a < b;", "+ return a <= b;"]


def test_a_sample_is_even_repeatable_and_replaced_from_its_room(tmp_path: Path) -> None:
    for room, lines in {"a": 40, "b": 4, "sim": 9}.items():
        (tmp_path / "csrc" / room).mkdir(parents=True)
        (tmp_path / "csrc" / room / "x.cpp").write_text("".join(f"v{n} = a{n} < b;\n" for n in range(lines)))
    assert find_rooms(tmp_path, False) == ["a", "b"]
    assert find_rooms(tmp_path, True) == ["a", "b", "sim"]
    mutations = collect(tmp_path, ["a", "b"])
    one, other = list(Sample(mutations, 6, 7)), list(Sample(mutations, 6, 7))
    assert one == other != list(Sample(mutations, 6, 8))
    assert sorted(mutation.room for mutation in one) == ["a"] * 3 + ["b"] * 3
    sample = Sample(mutations, 2, 7)
    drawn = []
    for mutation in sample:
        if not drawn:
            sample.draw_again(mutation)
        drawn.append(mutation.room)
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_tests_of_a_unit_are_found(root: Path) -> None:
    named = plan.tests_that_name(root, "csrc/core/transfer/engine_pool.cpp")
    assert "EnginePoolTest.AnEngineIsMadeWholeOrNotAtAll" in named
    sweeps = [file for file in (root / "tests" / "cpp").glob("*.cpp") if plan.is_sweep(file)]
    assert len(sweeps) >= 5


def test_every_python_test_of_the_plan_exists(root: Path) -> None:
    missing = [name for names in plan.PYTHON_TESTS.values() for name in names if not (root / name).exists()]
    assert missing == []


def test_the_nearest_folder_has_the_python_tests() -> None:
    assert plan.python_tests("csrc/torch/lms/packed.cpp") == plan.PYTHON_TESTS["torch/lms"]
    assert plan.python_tests("csrc/torch/cpu/pool.cpp") == plan.PYTHON_TESTS["torch"]
    assert plan.python_tests("csrc/vmm/reservation.cpp") == plan.python_tests("csrc/store/ram.cpp")


def test_every_equivalent_mutant_is_still_one_of_its_file(root: Path) -> None:
    stale = [
        (entry["path"], entry["diff"])
        for entry in Equivalents(root / EQUIVALENTS).entries
        if entry["diff"] not in diffs_of(root, str(entry["path"])) or len(str(entry["reason"])) < 20
    ]
    assert stale == [], "the code has changed: look whether it is equivalent still, and name it anew or not at all"


def diffs_of(root: Path, path: str) -> list[list[str]]:
    if not (root / path).is_file():
        return []
    source = (root / path).read_text()
    return [mutation.diff(source) for mutation in find_mutations(path, source)]


# --- the whole tool, on a tree with planted kills and survivors ---

CALC = """\
#include "room/calc.h"
bool is_below(int a, int b) { return a < b; }
int seen_by_python() { return kThree; }
bool seen_by_nobody(int a, int b) { return a == b; }
"""
TOY = {
    "csrc/room/calc.h": 'bool is_below(int a, int b);\nextern "C" int seen_by_python();\nconstexpr int kThree = 3;\n',
    "csrc/room/calc.cpp": CALC,
    "tests/cpp/calc_test.cpp": """\
#include "room/calc.h"
#define TEST(suite, name) int suite##name()
TEST(CalcTest, IsBelow) { return is_below(1, 2) && !is_below(2, 2) ? 0 : 1; }
int main() { return CalcTestIsBelow(); }
""",
    "tests/python/test_saver_operations.py": """\
import ctypes, os
from pathlib import Path
def test_toy():
    site = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    assert ctypes.CDLL(str(site / "toy" / "libebbtide.so")).seen_by_python() == 3
def test_other():
    pass
""",
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.20)
project(toy CXX)
enable_testing()
add_library(ebbtide SHARED csrc/room/calc.cpp)
target_include_directories(ebbtide PUBLIC csrc)
foreach(name ebbtide_preload ebbtide_sim _core)
  add_custom_target(${name})
endforeach()
add_executable(ebbtide_tests tests/cpp/calc_test.cpp csrc/room/calc.cpp)
target_include_directories(ebbtide_tests PRIVATE csrc)
add_test(NAME CalcTest.IsBelow COMMAND ebbtide_tests)
add_test(NAME c.toy COMMAND ${CMAKE_COMMAND} -E true)
install(TARGETS ebbtide LIBRARY DESTINATION toy)
""",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    assert shutil.which("git")
    for name, text in TOY.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "toy")], check=True)
    return tmp_path / "toy"


def run_tool(toy: Path, place: str = "") -> tuple[int, dict[int, set[str]]]:
    """The tool's exit status, and the outcomes of each line."""
    bench = toy.parent / "bench"
    status = main(["--root", str(toy), "--place", str(bench), "--at", f"csrc/room/calc.cpp{place}"])
    outcomes: dict[int, set[str]] = {}
    if status != 2:
        for mutant in json.loads((bench / "results" / "places.json").read_text())["mutants"]:
            outcomes.setdefault(mutant["line"], set()).add(f"{mutant['outcome']} {mutant['by']}".strip())
    return status, outcomes


def test_the_tool_on_a_toy_tree(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, outcomes = run_tool(toy)
    assert status == 1
    assert outcomes == {
        2: {"killed the tests that name it: CalcTest.IsBelow"},
        3: {"killed the Python tests: tests/python/test_saver_operations.py::test_toy"},
        4: {"survived"},
    }
    said = capsys.readouterr().out
    assert "- bool seen_by_nobody(int a, int b) { return a == b; }" in said
    assert (toy / "csrc" / "room" / "calc.cpp").read_text() == CALC
    # What is named as equivalent is not tried, and does not count.
    survivors = [mutant for mutant in find_mutations("csrc/room/calc.cpp", CALC) if mutant.line == 4]
    entries = [{"path": each.path, "diff": each.diff(CALC), "reason": "nobody calls it"} for each in survivors]
    (toy / EQUIVALENTS).parent.mkdir(parents=True)
    (toy / EQUIVALENTS).write_text(json.dumps(entries))
    status, outcomes = run_tool(toy, ":4")
    assert (status, outcomes) == (0, {4: {"equivalent"}})
    # A test that fails on the unbroken tree as well kills nothing.
    (toy / "csrc" / "room" / "calc.cpp").write_text(CALC.replace("kThree", "4"))
    assert run_tool(toy, ":3") == (1, {3: {"survived"}})
    assert "left out, since they fail on the unbroken tree: tests/python/test_saver" in capsys.readouterr().out


def test_a_tree_whose_tests_fail_is_no_baseline(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = toy / "tests" / "python" / "test_saver_operations.py"
    tests.write_text("import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test(n):\n    assert False\n")
    assert run_tool(toy, ":3") == (2, {})
    assert "the Python tests fail on the unbroken tree: tests/python/test_saver" in capsys.readouterr().err


def test_a_kill_counts_once_the_unbroken_tree_was_built_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is the mutant. A test that passed once is not asked again."""
    bench = Workbench(tmp_path, tmp_path, 1, with_sweeps=True)
    stage = plan.Stage("the tests", plan.PROGRAM, ("pytest",), ("a.py",))
    file = tmp_path / "tree" / "csrc" / "a.cpp"
    file.parent.mkdir(parents=True)
    file.write_text("return a < b;\n")
    calls: list[str] = []
    monkeypatch.setattr(bench, "stages", lambda path: [stage])
    monkeypatch.setattr(bench, "make", lambda targets: calls.append(file.read_text()) or True)
    monkeypatch.setattr(bench, "find_culprit", lambda: "a.py::one")
    monkeypatch.setattr(bench, "ask", lambda stage: calls.append(stage.chosen) or int("<=" in file.read_text()))
    mutation = find_mutations("csrc/a.cpp", file.read_text())[-1]
    for _ in range(2):
        assert bench.judge(mutation).by == "the tests: a.py::one"
    broken = ["return a <= b;\n", ("a.py",)]
    assert calls == [*broken, "return a < b;\n", ("a.py::one",), *broken]


def test_tests_are_left_out_beside_those_that_a_stage_leaves_out() -> None:
    ctest = plan.Stage("the C++ tests", plan.PROGRAM, ("ctest",), left_out=(r"^c\.",))
    assert ctest.without(["A.b/0"]).command == ("ctest", "--exclude-regex", r"^c\.|^A\.b/0$")
    assert ctest.only("A.b/0").command == ("ctest", "--tests-regex", r"^A\.b/0$")
    pytest_stage = plan.Stage("the Python tests", plan.PRODUCTS, ("python", "-m", "pytest"), ("a.py", "b.py"))
    assert pytest_stage.without(["a.py::x"]).command[3:] == ("--deselect=a.py::x", "a.py", "b.py")
    assert pytest_stage.only("a.py::x").command[3:] == ("a.py::x",)
