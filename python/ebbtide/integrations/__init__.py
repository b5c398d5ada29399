"""ebbtide inside other projects: vLLM's sleep mode, and trainers that take turns with something on one GPU."""

from typing import TYPE_CHECKING

from ebbtide.late_imports import late_imports

if TYPE_CHECKING:
    from ebbtide.integrations import lightning, transformers, verl, vllm

__all__ = ["lightning", "transformers", "verl", "vllm"]


if not TYPE_CHECKING:  # a checker would take any name for one of them
    __getattr__ = late_imports(__name__, {name: f"{__name__}.{name}" for name in __all__})


def __dir__() -> list[str]:
    return sorted(__all__)
