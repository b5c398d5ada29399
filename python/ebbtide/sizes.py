"""Sizes as people write them: "16GiB", or an int of bytes."""

from ebbtide import settings


def parse_size(size: str | int, name: str = "size") -> int:
    """The bytes of "16GiB" (binary), "16GB" (decimal), "1.5 MiB", "4096", or an int.

    Args:
        size: a number with a unit out of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB (case does not matter), or an int of
            bytes.
        name: the name of the size in errors.

    Raises:
        TypeError: neither str nor int (a bool or a float is neither).
        ValueError: malformed, unknown unit, negative, or above 2**63 - 1.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f'{name} must be a size like "16GiB" or an int of bytes, not {type(size).__name__}')
    # The core checks it, as every size.
    return int(settings.check(settings.find("device_limit"), size, name))


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
