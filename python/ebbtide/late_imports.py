"""Names of a package that are imported at their first use."""

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any


def late_imports(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `places` has the module of each name, or "module:attribute"."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places[name]
        return pkgutil.resolve_name(place if ":" in place else f"{place}:")  # it asks packages for their modules else

    return find
