"""Every Python lock is made by ebbtide.locks, so that a forked child can take it. csrc/DESIGN.md has every C++ lock."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from checks.python_trees import nodes_of

WAITED_FOR = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "Queue", "SimpleQueue"}
MODULES = {"threading", "_thread", "queue", "multiprocessing"}


C_LOCK = re.compile(r"^\s*(?:static |mutable |constinit )*std::(?:recursive_|shared_|timed_)*mutex \w+;", re.MULTILINE)
ROW = re.compile(r"^\| `([\w/]+/)` \| .* \|$", re.MULTILINE)
LEAVES = re.compile(r"^- `([\w/]+/)`: (.*(?:\n  .*)*)", re.MULTILINE)


def locks_by_folder(csrc: Path) -> Counter[str]:
    """How many locks the sources of each folder declare. The simulator is a driver, with locks of its own."""
    found: Counter[str] = Counter()
    for path in csrc.rglob("*"):
        if path.suffix in {".h", ".cpp"} and path.relative_to(csrc).parts[0] != "sim":
            found[f"{path.parent.relative_to(csrc).as_posix()}/"] += len(C_LOCK.findall(path.read_text()))
    return +found


def documented_locks(design: str) -> Counter[str]:
    """How many locks the section on locks lists for each folder: a row each, and the leaves, apart by semicolons."""
    section = re.split(r"^## ", design.partition("\n## Locks\n")[2], flags=re.MULTILINE)[0]
    found = Counter(ROW.findall(section))
    for folder, leaves in LEAVES.findall(section):
        found[folder] += leaves.count(";") + 1
    return found


def foreign_locks(source: str) -> list[int]:
    """The lines that make a lock themselves, or import what makes one."""
    lines = []
    for node in nodes_of(source):
        is_of_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_of_name and node.value.id in MODULES and node.attr in WAITED_FOR | {"allocate_lock"}:
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            lines += [node.lineno for alias in node.names if alias.name in WAITED_FOR | {"allocate_lock"}]
    return lines


def test_locks_are_made_in_one_place(root: Path) -> None:
    package = root / "python" / "ebbtide"
    found = {
        str(path.relative_to(package)): lines
        for path in sorted(package.rglob("*.py"))
        if (lines := foreign_locks(path.read_text()))
    }
    assert list(found) == ["locks.py"]


def test_the_law_finds_planted_locks() -> None:
    assert foreign_locks("import threading\nx = threading.Lock()\n") == [2]
    assert foreign_locks("from threading import RLock, Thread\n") == [1]
    assert foreign_locks("import queue\nclass A:\n    q = queue.Queue()\n") == [3]
    assert foreign_locks("import threading\nthreading.Thread(target=print).start()\nthreading.local()\n") == []


def may_be_left(node: ast.AST) -> bool:
    """Whether Python 3.13 protects no jump back to the beginning of this loop: see ebbtide.locks."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
        return any(generator.ifs for generator in node.generators)
    if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant):
        return True
    conditions = ast.If | ast.Assert | ast.Match | ast.While
    return isinstance(node, ast.For | ast.While) and any(
        isinstance(each, conditions) for part in node.body for each in ast.walk(part)
    )


def loops_below_with(source: str) -> list[int]:
    """The lines of loops that an interrupt may leave without the end of the `with` or the `finally` around them. Those
    in a function of their own, such as a generator expression, are none. A file closes with its last reference."""

    def inside(node: ast.AST) -> list[int]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            return []
        if isinstance(node, ast.GeneratorExp):
            return inside(node.generators[0].iter)
        if may_be_left(node):
            return [node.lineno]
        return [line for child in ast.iter_child_nodes(node) for line in inside(child)]

    found: set[int] = set()
    for node in nodes_of(source):
        is_with = isinstance(node, ast.With) and not all("open(" in ast.unparse(i.context_expr) for i in node.items)
        if is_with or (isinstance(node, ast.Try) and node.finalbody):
            found |= {line for statement in node.body for line in inside(statement)}
    return sorted(found)


def test_an_interrupt_in_a_loop_leaves_nothing_open(root: Path) -> None:
    package = root / "python" / "ebbtide"
    found = {str(path): loops_below_with(path.read_text()) for path in package.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("[x for x in y if x]", [2]),
        ("return {x: 1 for x in y if x}", [2]),
        ("list(x for x in [a for a in b if a])", [2]),
        ("for x in y:\n        if x: z()", [2]),
        ("for x in y:\n        assert x", [2]),
        ("for x in y:\n        while x: z()", [2]),
        ("for x in y:\n        match x:\n            case 1: z()", [2]),
        ("while y: z()", [2]),
        ("while True:\n        if x: z()", [2]),
        ("[x for x in y]", []),
        ("list(x for x in y if x)", []),
        ("for x in y: z()", []),
        ("while True: z()", []),
        ("f(lambda: [x for x in y if x])", []),
    ],
)
def test_planted_loops_are_found(body: str, lines: list[int]) -> None:
    for scope in ("with _lock", "with self._lock, other", "with torch.no_grad()"):
        assert loops_below_with(f"{scope}:\n    {body}\n") == lines
    assert loops_below_with(f"try:\n    {body}\nfinally:\n    z()\n") == lines
    assert loops_below_with(f"with path.open() as file:\n    {body}\n") == []


def test_the_design_has_every_lock_of_the_core(root: Path) -> None:
    found = locks_by_folder(root / "csrc")
    assert sum(found.values()) > 30
    assert found == documented_locks((root / "csrc/DESIGN.md").read_text())


DESIGN = """
## Locks

| folder | lock of |
|---|---|
| `a/` | one |
| `a/b/` | two |

- `a/`: three; four,
  which is long; five

What follows: `a/` is a folder.

## More

| `a/` | six |
"""


def test_documented_locks_are_counted() -> None:
    assert documented_locks(DESIGN) == {"a/": 4, "a/b/": 1}


@pytest.mark.parametrize(
    "text",
    [
        "  mutable std::mutex mutex_;  // of it\n",
        "static constinit std::mutex mutex;\n",
        "std::shared_mutex a;\n",
        "std::recursive_timed_mutex b;\n",
    ],
)
def test_a_planted_lock_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim/c.h").write_text(text)
    (tmp_path / "a/c.h").write_text("// std::mutex x;\nvoid f(std::mutex& m);\nstd::unique_lock<std::mutex> l;\n")
    assert locks_by_folder(tmp_path) == {}
    (tmp_path / "a/b/c.h").write_text(text)
    assert locks_by_folder(tmp_path) == {"a/b/": 1}
