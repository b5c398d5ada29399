"""Names that programs know from other projects, over ebbtide."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.compat import ibm_lms, torch_memory_saver

__all__ = ["ibm_lms", "torch_memory_saver"]


if not TYPE_CHECKING:  # a checker would take any name for one of them

    def __getattr__(name: str) -> Any:
        if name == "ibm_lms":
            return importlib.import_module("ebbtide.compat.ibm_lms")
        if name == "torch_memory_saver":
            return importlib.import_module("ebbtide.compat.torch_memory_saver")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
