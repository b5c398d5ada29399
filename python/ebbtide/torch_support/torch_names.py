"""Names of torch that differ between versions, or that torch does not promise.

tests/checks/torch_table.py lists every name of torch on which ebbtide relies.
"""

from functools import reduce
from typing import Any

from ebbtide.errors import StateError
from ebbtide.torch_support.versions import LEAST_TORCH, format_version

ORIGINAL = "_ebbtide_original"  # the attribute of a function of ours in torch's modules that has torch's own

# The functions in `torch._C` that take a device and the id of a pool, in any version of torch.
POOL_FUNCTIONS = [
    "_cuda_beginAllocateToPool",
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_endAllocateToPool",
    "_cuda_endAllocateCurrentStreamToPool",
    "_cuda_releasePool",
]


def find(*paths: str) -> Any:
    """The first of these names that this torch has; each is a path below the module torch. Where ebbtide
    has wrapped it for its callers, torch's own.

    Raises:
        StateError: it has none of them.
    """
    import torch

    for path in paths:
        try:
            found = reduce(getattr, path.split("."), torch)
        except AttributeError:
            continue
        return getattr(found, ORIGINAL, found)
    names = " and ".join(f"torch.{path}" for path in paths)
    raise StateError(
        f"torch {torch.__version__} has no {names}, which ebbtide needs: use a torch that ebbtide was tried with, from "
        f"{format_version(LEAST_TORCH)} on (docs/support.md lists them)"
    )


def end_allocate() -> Any:
    """The function that closes a pool, under the name that this torch has for it."""
    return find("_C._cuda_endAllocateToPool", "_C._cuda_endAllocateCurrentStreamToPool")
