"""ebbtide inside other projects: vLLM's sleep mode, and trainers that take turns with something on one GPU."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.integrations import lightning, openrlhf, transformers, verl, vllm

__all__ = ["lightning", "openrlhf", "transformers", "verl", "vllm"]


if not TYPE_CHECKING:  # a checker would take any name for one of them

    def __getattr__(name: str) -> Any:
        if name == "lightning":
            return importlib.import_module("ebbtide.integrations.lightning")
        if name == "openrlhf":
            return importlib.import_module("ebbtide.integrations.openrlhf")
        if name == "transformers":
            return importlib.import_module("ebbtide.integrations.transformers")
        if name == "verl":
            return importlib.import_module("ebbtide.integrations.verl")
        if name == "vllm":
            return importlib.import_module("ebbtide.integrations.vllm")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
