"""Sizes as people write them: "16GiB", or an int of bytes."""

import re
from fractions import Fraction

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST = 2**63 - 1


def parse_size(size: str | int, name: str = "size") -> int:
    """The bytes of "16GiB" (binary), "16GB" (decimal), "1.5 MiB", "4096", or an int.

    Args:
        size: a number with a unit out of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB (case does not matter), or an int of
            bytes.
        name: what the size is for, to name in errors.

    Raises:
        TypeError: neither str nor int (a bool or a float is neither).
        ValueError: malformed, unknown unit, negative, or above 2**63 - 1.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f'{name} must be a size like "16GiB" or an int of bytes, not {type(size).__name__}')
    value = size if isinstance(size, int) else _parse_text(size, name)
    if value < 0:
        raise ValueError(f"{name} must not be negative: {size!r}")
    if value > _LARGEST:
        raise ValueError(f"{name} is beyond any memory: {size if isinstance(size, int) else size[:40]!r}")
    return value


def _parse_text(text: str, name: str) -> int:
    match = _PATTERN.fullmatch(text) if len(text) <= 64 else None
    if match is None:
        raise ValueError(f'{name} must be a size like "16GiB" or "512MiB", not {text[:40]!r}')
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower()) if unit else 1
    if factor is None:
        hint = f"; write {number}{unit}iB or {number}{unit}B" if unit.lower() in {"k", "m", "g", "t"} else ""
        raise ValueError(f"{name} has the unknown unit {unit!r} (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB){hint}")
    return int(Fraction(number) * factor)


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people, binary units: 512 B, 2.0 MiB, 15.3 GiB."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 999.95 or unit == "TiB":
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable")
