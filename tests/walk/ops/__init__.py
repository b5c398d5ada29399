"""The walk's operations. Each file registers its own when it is imported; `load` imports all of them."""

import importlib
import pkgutil
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..world import World

Arguments = dict[str, Any]


class Operation:
    """A kind of step. `draw` chooses arguments that JSON can hold; objects are numbers. `run` must do the same for the
    same arguments, and raises Skip if an object does not exist."""

    name = ""
    weight = 1.0
    sim_only = False

    def draw(self, world: "World", rng: Random) -> Arguments | None:
        """The arguments of a step, or None if the step is impossible now."""
        raise NotImplementedError

    def run(self, world: "World", **arguments: Any) -> str | None:
        """Runs the step. Returns the outcome in a word."""
        raise NotImplementedError


@dataclass
class Registry:
    """The operations by name."""

    operations: dict[str, Operation]

    def add(self, kind: type[Operation]) -> type[Operation]:
        """A decorator that registers an operation."""
        operation = kind()
        assert operation.name not in self.operations
        self.operations[operation.name] = operation
        return kind


registry = Registry({})
register = registry.add


def load() -> dict[str, Operation]:
    """All operations, always in the same order."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(registry.operations.items()))
