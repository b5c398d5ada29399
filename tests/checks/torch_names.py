"""Private names of torch in Python sources: what begins with an underscore and is not ebbtide's or Python's own."""

import ast
from collections.abc import Container, Iterator

from checks.python_trees import nodes_of

# Modules of Python that have such names.
_NOT_TORCH = {"os", "sys", "ctypes"}


def private_names(text: str, own: Container[str] = ()) -> set[str]:
    """Below `torch.` where it is written so; else the attribute alone. `torch._C` by itself is not a name.

    Args:
        own: names that the package defines itself (`names_defined`).
    """
    found = set()
    for node in nodes_of(text):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            module = (node.module or "").partition(".")[2]
            paths = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
            found |= {path for path in paths if _is_private(path)}
        elif isinstance(node, ast.Attribute):
            found |= _private_attribute(node, own)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)) and name.value not in own:
                found.add(str(name.value))
    longer = {part for name in found for part in _prefixes(name)}
    return found - longer - {"_C"}


def names_looked_up(text: str) -> set[str]:
    """The names that are given to `torch_names.find`."""
    found = set()
    for node in nodes_of(text):
        if isinstance(node, ast.Call) and _chain(node.func) in (["find"], ["torch_names", "find"]):
            found |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
    return found


def _private_attribute(node: ast.Attribute, own: Container[str]) -> set[str]:
    chain = _chain(node)
    if chain[:1] == ["torch"]:
        path = ".".join(chain[1:])
        return {path} if _is_private(path) else set()
    is_ours = node.attr in own or chain[:1] in [[name] for name in _NOT_TORCH]
    return {node.attr} if _is_private(node.attr) and not is_ours else set()


def names_defined(text: str) -> Iterator[str]:
    """The definitions of a file: functions, classes, attributes and variables that it assigns."""
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def _chain(node: ast.expr) -> list[str]:
    """["torch", "_C", "_x"] of torch._C._x; [] of what begins with no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])
