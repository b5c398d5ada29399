"""ebbtide inside other projects: vLLM's sleep mode, and trainers that take turns with something on one GPU."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.integrations import lightning, transformers, verl, vllm

__all__ = ["lightning", "transformers", "verl", "vllm"]


if not TYPE_CHECKING:  # a checker would take any name for one of them

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
