"""Names that programs know from other projects, over ebbtide."""

from typing import TYPE_CHECKING

from ebbtide.late_imports import late_imports

if TYPE_CHECKING:
    from ebbtide.compat import ibm_lms, torch_memory_saver

__all__ = ["ibm_lms", "torch_memory_saver"]


if not TYPE_CHECKING:  # a checker would take any name for one of them
    __getattr__ = late_imports(__name__, {name: f"{__name__}.{name}" for name in __all__})


def __dir__() -> list[str]:
    return sorted(__all__)
