"""The core's state of some tags. The cost does not depend on how many other tags there are."""

from collections.abc import Sequence

from ebbtide import _core


def find_tags(names: Sequence[str]) -> "dict[str, _core.TagInfo]":
    """The known ones of these tags (none: all), by name, in the order given."""
    if not names:
        return {info.tag: info for info in _core.tags()}
    infos = {}
    for name in names:
        info = _core.query_tag(name)
        if info is not None:
            infos[name] = info
    return infos


def allocations_of(names: Sequence[str]) -> "list[_core.AllocationInfo]":
    """The allocations of these tags (none: all tags)."""
    if not names:
        return _core.allocations()
    return [info for name in dict.fromkeys(names) for info in _core.allocations(name)]


def has_memory_away(info: "_core.TagInfo") -> bool:
    """Whether a resume would move any of the tag's memory."""
    return info.stored_bytes + info.dropped_bytes + info.detached_bytes + info.paused_host_bytes > 0


def check_known(names: Sequence[str]) -> None:
    """Nothing, if regions named all of these.

    Raises:
        StateError: an unknown tag; it lists the known ones.
    """
    for name in names:
        _core.require_tag(name)
