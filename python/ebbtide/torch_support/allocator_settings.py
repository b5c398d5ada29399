"""Settings of torch's CUDA allocator with which regions cannot work, as its variables write them."""

import re
from collections.abc import Mapping

EXPANDABLE_SEGMENTS_FROM = (2, 13)
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_OPTION = re.compile(r"(expandable_segments\s*:\s*)(\w+)", re.IGNORECASE)


def has_expandable_segments(settings: str) -> bool:
    """Whether these settings of torch's allocator, in the form of the variables, switch them on."""
    return any(value.lower() == "true" for _, value in _OPTION.findall(settings))


def says_no_expandable_segments(settings: str) -> bool:
    """Whether these settings name them, and switch them off."""
    return bool(_OPTION.search(settings)) and not has_expandable_segments(settings)


def without_expandable_segments(settings: str) -> str:
    """The same settings, but with expandable segments off."""
    return _with(settings, "False")


def with_expandable_segments(settings: str) -> str:
    """The same settings, but with expandable segments on."""
    return _with(settings, "True")


def _with(settings: str, value: str) -> str:
    fixed, count = _OPTION.subn(rf"\g<1>{value}", settings)
    return fixed if count else ",".join(filter(None, (settings.strip(" ,"), f"expandable_segments:{value}")))


def switched_on_by(environment: Mapping[str, str], version: tuple[int, int]) -> str:
    """The variable that switches them on where regions can't work with them; "" if there is none."""
    if version >= EXPANDABLE_SEGMENTS_FROM:
        return ""
    return next((name for name in ALLOCATOR_VARIABLES if has_expandable_segments(environment.get(name, ""))), "")
