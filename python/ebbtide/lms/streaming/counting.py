"""How much has passed through the device."""

from ebbtide.locks import make_lock

_lock = make_lock()
_streamed_bytes = 0


def streamed_bytes() -> int:
    """Copied in since `reset`."""
    return _streamed_bytes


def reset() -> None:
    """Counts from zero again."""
    global _streamed_bytes
    _streamed_bytes = 0


def count(size_bytes: int) -> None:
    """What was copied in."""
    global _streamed_bytes
    with _lock:
        _streamed_bytes += size_bytes
