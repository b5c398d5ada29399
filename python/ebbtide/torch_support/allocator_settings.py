"""Settings of torch's CUDA allocator with which regions cannot work."""

import re
from collections.abc import Mapping

EXPANDABLE_SEGMENTS_FROM = (2, 13)
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether torch maps the segments of its own pools itself, past the preload library."""
    return any(_EXPANDABLE.search(environment.get(variable, "")) for variable in ALLOCATOR_VARIABLES)


def expandable_segments_problem(environment: Mapping[str, str], version: tuple[int, int]) -> str | None:
    """The sentence that says what to set where torch's expandable segments would break regions; None where all is
    well.

    Before torch 2.13 such a segment is torch's own mapping: a pool's allocator is not asked, so nothing could be
    paused.
    """
    if version >= EXPANDABLE_SEGMENTS_FROM:
        return None
    for variable in ALLOCATOR_VARIABLES:
        options = environment.get(variable, "")
        if _EXPANDABLE.search(options):
            fixed = re.sub(r"(expandable_segments\s*:\s*)true", r"\1False", options, flags=re.IGNORECASE)
            return (
                f"{variable} has expandable_segments:True, and torch {version[0]}.{version[1]} then takes memory past "
                f"the pools, so that nothing could be paused: start the program with {variable}={fixed}"
            )
    return None
