"""Names of a package that are imported at their first use."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def late_imports(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `places` has the module of each name, or "module:attribute"."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = places[name].partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    return find
