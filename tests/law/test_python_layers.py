"""The room law of python/README.md, held over every import of the package: no circle, nothing upward, nothing late."""

import ast
import re
from pathlib import Path

import pytest
from checks.python_imports import Import, find_circles, find_modules, graph_of, reachable, read_imports

PACKAGE = "ebbtide"
TABLE_ROW = re.compile(r"^\| `(?P<room>[a-z_./]+)` \|(?P<what>[^|]*)\|(?P<allowed>[^|]*)\|$", re.MULTILINE)
MAX_MODULES = 10
# What may be imported inside a function, and the reason. A module of the package may be imported late as well where
# that puts one of these off; a late import that puts off nothing belongs to the top of its file.
LATE = {
    "torch": "large, and optional: only regions need it",
    "rich": "slow to import: only commands that print a table, and progress bars, need it",
    "matplotlib": "optional: only pictures need it",
    "vllm": "optional: only its own processes have it",
    "pydoc_data": "optional: distributions leave it out",
    "torch_memory_saver": "found only where its folder has become an entry of sys.path",
    "ebbtide.launch.preloading": "slow to import: only programs that start others call `ebbtide.env`",
    "ebbtide._core": "compiled: `ebbtide doctor` reports where it does not load, and `ebbtide --help` does without",
}
# Packages whose `__init__` is a public surface. Those of all other rooms hold a docstring and nothing else.
SURFACES = {
    *("ebbtide", "ebbtide.saver", "ebbtide.lms", "ebbtide.cli", "ebbtide.torch_extension"),
    *("ebbtide.compat", "ebbtide.integrations"),
    "ebbtide.compat.tms.torch_memory_saver",
}


def read_law(readme: str) -> dict[str, set[str]]:
    """Each room, the lowest first, and what it may import besides itself."""
    return {row["room"]: set(re.findall(r"`([^`]+)`", row["allowed"])) for row in TABLE_ROW.finditer(readme)}


def room_of(path: Path, package: Path) -> str:
    """The row that a module belongs to: its folder, or the module itself where it is a surface."""
    folder = path.relative_to(package).parent.as_posix()
    if path.name == "__init__.py" and folder in (".", "saver", "lms"):
        return "__init__.py" if folder == "." else f"{folder}/__init__.py"
    return f"{folder}/"


def find_breaches(root: Path) -> list[str]:
    """Every import in `root`/ebbtide that the table of `root`/README.md does not allow."""
    law = read_law((root / "README.md").read_text())
    modules = find_modules(root, PACKAGE)
    rooms = {name: room_of(path, root / PACKAGE) for name, path in modules.items()}
    imports = read_imports(modules)
    breaches = [f"{name}: {room} has no row in README.md" for name, room in rooms.items() if room not in law]
    for each in imports:
        if each.target in modules:
            source, target = rooms[each.source], rooms[each.target]
            if source in law and source != target and target not in law[source]:
                breaches.append(
                    f"{each.source}:{each.line}: imports {each.target}, but {source} may not import {target}"
                )
    breaches += [f"a circle of imports: {', '.join(circle)}" for circle in find_circles(graph_of(imports, modules))]
    return breaches + find_late_imports(imports, modules) + find_room_faults(modules, root)


def find_late_imports(imports: list[Import], modules: dict[str, Path]) -> list[str]:
    """Imports inside functions that put off nothing of LATE."""
    at_top: dict[str, set[str]] = {name: set() for name in modules}
    for each in imports:
        if not each.is_late and not each.is_typing:
            at_top[each.source].add(name_in_late(each.target) or each.target)

    def loads(name: str) -> set[str]:
        return ({name} | reachable(at_top, name)) & LATE.keys()

    return [
        f"{each.source}:{each.line}: imports {each.target} inside a function: put it at the top of the file"
        for each in imports
        if each.is_late
        # A module of its own, by the name that is asked for; `late_imports` is checked where it is called.
        and not (each.source in {*SURFACES, "ebbtide.late_imports"} and each.target == "?")
        and not loads(name_in_late(each.target) or each.target) - loads(each.source)
    ]


def name_in_late(target: str) -> str | None:
    """The entry of LATE that an import falls under."""
    return next((name for name in LATE if target == name or target.startswith(f"{name}.")), None)


def find_room_faults(modules: dict[str, Path], root: Path) -> list[str]:
    """Rooms that say nothing of themselves, that hand names on, or that are crowded."""
    faults = []
    for name, path in modules.items():
        if path.name != "__init__.py":
            continue
        body = ast.parse(path.read_text()).body
        is_documented = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        if not is_documented:
            faults.append(f"{name}: its __init__.py has no docstring")
        if name not in SURFACES and len(body) > 1:
            faults.append(f"{name}: its __init__.py holds more than a docstring")
        count = sum(1 for other in path.parent.glob("*.py") if other.name != "__init__.py")
        if count > MAX_MODULES:
            faults.append(f"{name}: {count} modules in one room, the limit is {MAX_MODULES}")
    return faults


def test_every_import_keeps_the_law(root: Path) -> None:
    breaches = find_breaches(root / "python")
    assert not breaches, "\n".join(breaches)


def test_every_row_of_the_table_exists(root: Path) -> None:
    law = read_law((root / "python" / "README.md").read_text())
    assert [room for room in law if not (root / "python" / PACKAGE / room).exists()] == []
    assert {name for allowed in law.values() for name in allowed} <= set(law)


def test_no_row_allows_what_stands_below_it(root: Path) -> None:
    """The table itself must not allow a circle: each room may import rooms of earlier rows alone."""
    law = read_law((root / "python" / "README.md").read_text())
    order = list(law)
    for room, allowed in law.items():
        assert [name for name in allowed if order.index(name) >= order.index(room)] == [], room


def test_every_allowance_is_used(root: Path) -> None:
    law = read_law((root / "python" / "README.md").read_text())
    modules = find_modules(root / "python", PACKAGE)
    rooms = {name: room_of(path, root / "python" / PACKAGE) for name, path in modules.items()}
    used = {(rooms[each.source], rooms[each.target]) for each in read_imports(modules) if each.target in modules}
    idle = {(room, name) for room, allowed in law.items() for name in allowed} - used
    assert idle == set(), "the table of python/README.md allows what nobody does"


# --- the law, seen to be broken ---

PLANTED_LAW = """
| room | what it is | may import |
|---|---|---|
| `./` | low | |
| `saver/low/` | values | `./` |
| `saver/high/` | operations | `./` `saver/low/` |
| `saver/__init__.py` | the surface | `saver/high/` |
| `__init__.py` | the surface | `./` |
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A law-abiding tree of two rooms."""
    for name, text in {
        "README.md": PLANTED_LAW,
        "ebbtide/__init__.py": '"""Top."""\nfrom ebbtide.errors import Error',
        "ebbtide/_core.pyi": "",
        "ebbtide/errors.py": "class Error(Exception): ...",
        "ebbtide/saver/__init__.py": '"""Public."""\nfrom ebbtide.saver.high.act import act',
        "ebbtide/saver/low/__init__.py": '"""Low."""',
        "ebbtide/saver/low/value.py": "import os\nfrom ebbtide import errors",
        "ebbtide/saver/low/tensor.py": "import torch\nfrom ebbtide import _core",
        "ebbtide/saver/high/__init__.py": '"""High."""',
        "ebbtide/saver/high/act.py": "from ebbtide import _core\nfrom ebbtide.saver.low.value import x\n"
        "def act():\n    import torch.cuda\n    from ebbtide.saver.low import tensor",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text + "\n")
    assert find_breaches(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("saver/low/a.py", "from ebbtide.saver.high import act", "saver/low/ may not import saver/high/"),
        ("saver/low/a.py", "from ebbtide.saver.high.act import act", "saver/low/ may not import saver/high/"),
        ("saver/low/a.py", "import ebbtide.saver.high.act", "saver/low/ may not import saver/high/"),
        ("saver/high/a.py", "from ebbtide import saver", "saver/high/ may not import saver/__init__.py"),
        (
            "saver/low/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ebbtide.saver.high import act",
            "saver/low/ may not import saver/high/",
        ),
        ("saver/high/a.py", "def f():\n    from ebbtide.saver.low import value", "inside a function"),
        ("saver/high/a.py", "def f():\n    import json", "inside a function"),
        ("saver/high/a.py", "class A:\n    def f(self):\n        import json", "inside a function"),
        ("saver/high/a.py", "import importlib\nf = lambda: importlib.import_module('json')", "inside a function"),
        ("saver/high/a.py", "import importlib\ndef f(name):\n    importlib.import_module(name)", "imports ? inside"),
        # It puts off nothing: the file loads torch, or the core, anyway.
        (
            "saver/high/a.py",
            "import torch\nfrom ebbtide import _core\ndef f():\n    from ebbtide.saver.low import tensor",
            "inside a function",
        ),
        (
            "saver/high/a.py",
            "from ebbtide.saver.low import tensor\ndef f():\n    from ebbtide import _core",
            "inside a function",
        ),
        ("extra/__init__.py", '"""A new room."""', "extra/ has no row"),
        ("saver/low/__init__.py", '"""Low."""\nimport os', "more than a docstring"),
        ("saver/low/__init__.py", "", "no docstring"),
    ],
)
def test_a_planted_breach_is_found(planted: Path, file: str, text: str, complaint: str) -> None:
    path = planted / PACKAGE / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    assert [complaint in breach for breach in find_breaches(planted)] == [True]


def test_a_planted_circle_is_found(planted: Path) -> None:
    low = planted / PACKAGE / "saver" / "low"
    (low / "a.py").write_text("import torch\nfrom ebbtide.saver.low import b\n")
    (low / "b.py").write_text("def f():\n    from ebbtide.saver.low import a\n")
    assert find_breaches(planted) == ["a circle of imports: ebbtide.saver.low.a, ebbtide.saver.low.b"]


def test_a_crowded_room_is_found(planted: Path) -> None:
    for number in range(MAX_MODULES - 1):
        (planted / PACKAGE / "saver" / "high" / f"m{number}.py").write_text("")
    assert find_breaches(planted) == []
    (planted / PACKAGE / "saver" / "high" / "one_more.py").write_text("")
    assert [f"the limit is {MAX_MODULES}" in breach for breach in find_breaches(planted)] == [True]


def test_relative_imports_are_refused(planted: Path) -> None:
    (planted / PACKAGE / "saver" / "low" / "a.py").write_text("from . import value\n")
    with pytest.raises(ValueError, match="imports are absolute"):
        find_breaches(planted)
