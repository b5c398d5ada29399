"""Every citation leads somewhere: facts, invariants and tests of csrc/DESIGN.md, and files of the repository."""

from pathlib import Path

import pytest
from checks.citations import DESIGN, FOREIGN, MADE, Citations, prose_of


@pytest.fixture(scope="module")
def citations(root: Path) -> Citations:
    return Citations(root)


def test_every_citation_resolves(citations: Citations) -> None:
    faults = citations.find_faults()
    assert not faults, "\n".join(faults)


def test_the_design_names_tests_that_exist(citations: Citations) -> None:
    faults = citations.find_faults_of_design()
    assert not faults, "\n".join(faults)


def test_citations_are_found_at_all(root: Path) -> None:
    """A checker that reads no comment finds no fault."""
    cited = {
        "csrc/vmm/physical_memory.h": "csrc/DESIGN.md, F5",
        "csrc/preload/resolver.h": "invariant 4",
        "tests/c/capi_fork.c": "Invariant 10",
        "tests/gpu/test_gpu_exits.py": "csrc/DESIGN.md, F",
        "tests/cpp/CMakeLists.txt": "tests/c",
    }
    for path, words in cited.items():
        assert any(words in prose for _, prose in prose_of(path, (root / path).read_text())), path


def test_an_exception_is_needed(citations: Citations) -> None:
    """A name that the repository has, or that nobody cites, is no exception."""
    strict = Citations(citations.root, foreign=set())
    cited = {fault.split(": ", 1)[1].split(" is not")[0] for fault in strict.find_faults()}
    assert {name.rpartition("/")[2] for name in cited} == FOREIGN | MADE


# --- the checker, seen to fail ---

TREE = {
    DESIGN: """\
# Design
- **F1.** A map takes offset 0.
  `test_map`
- **F2.** A figure. No test.

## Invariants
- **Invariant 1.** An address stays. `SomeTest.Invariant1_*`
- **Invariant 2.** So do bytes. `test_map`
""",
    "csrc/vmm/mapping.h": '// csrc/DESIGN.md, F1 and invariants 1 and 2.\nauto text = "F9, gone.h";  // cuda.h\n',
    "python/a.py": '"""See csrc/vmm/mapping.h and tests/law."""\n# F2; mapping.h\nx = "gone.py"\n',
    "tests/conformance/test_calls.py": "def test_map(): pass\ndef test_both(): pass\n",
    "tests/law/test_both.py": "def test_both(): pass\n",
    "tests/cpp/some_test.cpp": "TEST_F(SomeTest, Invariant1_StaysPut) {}\n",
    "build/out.md": "gone.cpp, invariant 99",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_good_tree_has_no_fault(tree: Path) -> None:
    assert Citations(tree).find_faults() == []
    assert Citations(tree).find_faults_of_design() == []


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("csrc/a.h", "// FACTS.md, section 1\n", "FACTS.md is not in the repository"),
        ("csrc/a.h", "int x; /* see\n gone.h */\n", "gone.h is not in the repository"),
        ("csrc/a.h", "// core/vmm/mapping.h\n", "core/vmm/mapping.h is not in the repository"),
        ("csrc/a.h", "long x = 1'000;  // ../gone.def\n", "../gone.def is not in the repository"),
        ("csrc/a.cpp", "char c = '\"';  // F7\n", "csrc/DESIGN.md has no F7"),
        ("csrc/a.cpp", 'auto s = R"(// F8)";  // (invariant 13)\n', "csrc/DESIGN.md has no invariant 13"),
        ("csrc/a.cpp", "// Invariants 1 to 3 hold.\n", "csrc/DESIGN.md has no invariant 3"),
        ("csrc/a.cpp", "// invariants 1, 2 and 4\n", "csrc/DESIGN.md has no invariant 4"),
        ("python/b.py", "def f():\n    '''As csrc/gone.py says.'''\n", "csrc/gone.py is not in the repository"),
        ("python/b.py", "x = 1  # tests/gone says\n", "tests/gone is not in the repository"),
        ("python/b.py", "class A:\n    '''F3'''\n", "csrc/DESIGN.md has no F3"),
        ("tests/cpp/b_test.cpp", "TEST(B, Invariant5_Fails) {}\n", "csrc/DESIGN.md has no invariant 5"),
        ("tests/python/test_b.py", "def test_invariant_6_fails(): pass\n", "csrc/DESIGN.md has no invariant 6"),
        ("tests/python/test_b.py", "def test_invariant7_fails(): pass\n", "csrc/DESIGN.md has no invariant 7"),
        ("docs/page.md", "Read `csrc/gone.md`.\n", "csrc/gone.md is not in the repository"),
        ("docs/page.md", "[here](../csrc/gone/)\n", "csrc/gone/ is not in the repository"),
        ("tools/x.sh", "true # as gone.mk does\n", "gone.mk is not in the repository"),
        ("Makefile", "# gone.py\n", "gone.py is not in the repository"),
    ],
)
def test_a_planted_citation_is_found(tree: Path, path: str, text: str, complaint: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    faults = Citations(tree).find_faults()
    assert [complaint in fault and fault.startswith(f"{path}: ") for fault in faults] == [True], faults


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("`test_map`", "`test_mop`", "there are 0 tests of the name test_mop"),
        ("`test_map`", "`test_both`", "there are 2 tests of the name test_both"),
        ("SomeTest.", "OtherTest.", "no test OtherTest.Invariant1_*"),
        ("Invariant1_*`", "Invariant1_Moves`", "no test SomeTest.Invariant1_Moves"),
        (" No test.", "", "F2 names no test"),
        ("`SomeTest.Invariant1_*`", "", "Invariant 1 names no test"),
        ("**F2.**", "**F3.**", "the facts are numbered [1, 3]"),
        ("**Invariant 2.**", "**Invariant 1.**", "the invariants are numbered [1, 1]"),
        ("**F", "**G", "the facts are numbered []"),
    ],
)
def test_a_planted_fault_of_the_design_is_found(tree: Path, old: str, new: str, complaint: str) -> None:
    (tree / DESIGN).write_text(TREE[DESIGN].replace(old, new))
    faults = Citations(tree).find_faults_of_design()
    assert any(complaint in fault for fault in faults), faults
