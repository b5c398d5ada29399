"""The tensors that autograd's graphs saved for a backward pass that has not run."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch


class Saved(NamedTuple):
    """What some graphs hold.

    `saved` has a tensor once for each time that it was saved. torch before the version whose saved tensors have an
    attribute `data` does not tell these without running hooks: there, `leaves_of_old_torch` are the leaves in question.
    """

    saved: list[torch.Tensor]
    leaves_of_old_torch: list[torch.Tensor]


def find(roots: Iterable[Any]) -> Saved:
    """The tensors that the graphs behind these nodes hold. No hook runs, and nothing is unpacked."""
    saved: list[torch.Tensor] = []
    leaves: list[torch.Tensor] = []
    names: dict[type, list[str]] = {}
    for node in _nodes(roots):
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            for entry in _entries(node, name):
                if hasattr(entry, "unpack_hook"):
                    saved += _held_by(entry)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and not hasattr(torch._C._autograd.SavedTensor, "data"):
            leaves.append(leaf)
    return Saved(saved, leaves)


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    seen = set()
    waiting = list(roots)
    keep = []  # a node's Python object may exist only during this walk
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        keep.append(node)
        yield node
        waiting += [edge[0] for edge in node.next_functions]


def _entries(node: Any, name: str) -> tuple[Any, ...]:
    try:
        value = getattr(node, name)
    except (AttributeError, RuntimeError):  # a graph that has run backward has released them
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _held_by(entry: Any) -> list[torch.Tensor]:
    try:
        has_hook, value = entry.unpack_hook is not None, entry.data
    except RuntimeError:
        return []
    return [value] if isinstance(value, torch.Tensor) and not has_hook else []  # a packed value belongs to its hook
