"""Every lock of the package is made by ebbtide.locks, so that a forked child can take it."""

import ast
from pathlib import Path

WAITED_FOR = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "Queue", "SimpleQueue"}
MODULES = {"threading", "_thread", "queue", "multiprocessing"}


def foreign_locks(source: str) -> list[int]:
    """The lines that make a lock themselves, or import what makes one."""
    lines = []
    for node in ast.walk(ast.parse(source)):
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
