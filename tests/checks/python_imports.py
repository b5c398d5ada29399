"""The imports of a Python package, read from its sources: a graph of modules, its circles and its longest chain.

Nothing is imported to find them. Imports at module level, inside functions, under TYPE_CHECKING, and through
`importlib.import_module` with a literal name all count as edges.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checks.python_trees import parse


@dataclass(frozen=True)
class Import:
    """One import: who imports what, and where.

    Attributes:
        source, target: module names. A target outside the package is named by what stands in the statement.
        is_late: it stands in a function, so that it runs at a call.
        is_typing: it stands under TYPE_CHECKING, so that it never runs.
    """

    source: str
    target: str
    line: int
    is_late: bool
    is_typing: bool


def module_name(path: Path, root: Path) -> str:
    """The dotted name of a source; a package is named by its `__init__`."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_modules(root: Path, package: str) -> dict[str, Path]:
    """The modules of the package that lies in `root`, by name. Compiled ones count through their stubs."""
    paths = sorted(path for path in (root / package).rglob("*") if path.suffix in (".py", ".pyi"))
    return {module_name(path, root): path for path in paths}


def read_imports(modules: dict[str, Path]) -> list[Import]:
    """Every import in these modules."""
    found = []
    for name, path in modules.items():
        for node, is_late, is_typing in _statements(parse(path.read_text()), False, False):
            targets = dict.fromkeys(_targets(node, modules))
            found += [Import(name, target, node.lineno, is_late, is_typing) for target in targets if target != name]
    return found


def _statements(tree: ast.AST, is_late: bool, is_typing: bool) -> Iterator[tuple[ast.stmt | ast.Call, bool, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            yield node, is_late or _names_late_imports(node), is_typing
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from _statements(node, is_late or is_function, is_typing or is_guard)


def _targets(node: ast.stmt | ast.Call, modules: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level or not node.module:
            raise ValueError(f"imports are absolute in this package, and this one is not: {ast.unparse(node)}")
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules else node.module
    elif isinstance(node, ast.Call) and _is_import_module(node.func):
        name = node.args[0] if node.args else None
        yield name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "?"
    elif _names_late_imports(node):
        for place in node.args[1].values if isinstance(node.args[1], ast.Dict) else ():
            yield str(ast.literal_eval(place)).partition(":")[0]


def _names_late_imports(node: ast.AST) -> bool:
    """Whether it is a call of `ebbtide.late_imports`, whose strings are modules, or "module:attribute"."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "late_imports"


def _is_import_module(function: ast.expr) -> bool:
    is_name = isinstance(function, ast.Name | ast.Attribute)  # to unparse other calls takes long
    return is_name and ast.unparse(function) in ("importlib.import_module", "import_module", "__import__")


def graph_of(imports: list[Import], modules: dict[str, Path], *, with_typing: bool = True) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, now or late."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for each in imports:
        if each.target in modules and (with_typing or not each.is_typing):
            graph[each.source].add(each.target)
    return graph


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach one another, the largest first."""
    reached = {name: reachable(graph, name) for name in graph}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }
    return sorted((sorted(circle) for circle in circles), key=lambda circle: (-len(circle), circle))


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What `start` imports, directly or not; itself only where it is in a circle."""
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph.get(name, ())
    return found


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest chain of imports in a graph without circles, from the top down."""
    best: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in best:
            best[name] = [name, *max((chain(target) for target in sorted(graph[name])), key=len, default=[])]
        return best[name]

    return max((chain(name) for name in sorted(graph)), key=len, default=[])
