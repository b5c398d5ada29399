"""Advice for a program where torch is out of memory while tags cache unused memory.

torch takes no memory of other pools. While it looks for memory it holds its lock, and its observers of out-of-memory
need the GIL, which a thread of autograd must not wait for. So the advice is made where the error is shown: nothing is
added to torch's behaviour, and `args` stay as they are.
"""

from typing import Any

from ebbtide import logs
from ebbtide.errors import Error
from ebbtide.saver.pools import captures
from ebbtide.saver.pools.pool_segments import free_in, look_at
from ebbtide.saver.pools.region_pools import registry
from ebbtide.saver.state.known_tags import allocations_of
from ebbtide.sizes import format_size

_MOST_TAGS = 3  # that are named


def install() -> None:
    """From now on the text of a torch.OutOfMemoryError says how much `saver.trim` would give back, if any."""
    import torch

    kind: Any = torch.OutOfMemoryError
    kind.__str__ = _explain


def cached_bytes() -> dict[str, int]:
    """The bytes of device memory that `saver.trim` would give back, by tag, the most first."""
    if captures.is_capturing():
        return {}
    seen = look_at([pool for _, pool in registry.idle() if not pool.is_captured])
    free = set().union(*map(free_in, seen.values()))
    found: dict[str, int] = {}
    for info in allocations_of([]) if free else ():
        on_device = info.resident_bytes - info.host_bytes
        if info.address in free and on_device > 0:
            found[info.tag] = found.get(info.tag, 0) + on_device
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _explain(error: RuntimeError) -> str:
    """`__str__` of torch's class, which ebbtide's own error inherits."""
    text = RuntimeError.__str__(error)
    if isinstance(error, Error):
        return text
    try:
        found = cached_bytes()
    except Exception as problem:  # torch's own text is the one to show
        logs.logger.debug("the cached memory of tags is not known: %r", problem)
        return text
    return " ".join(filter(None, (text, _sentence(found)))) if found else text


def _sentence(found: dict[str, int]) -> str:
    names = ", ".join(map(repr, found)) if len(found) <= _MOST_TAGS else ""
    return (
        f"ebbtide: the pools of {len(found)} tag{'s' * (len(found) > 1)} cache {format_size(sum(found.values()))} that "
        f"no tensor uses: saver.trim({names}) gives it back."
    )
