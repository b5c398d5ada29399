"""Which addresses are on the host."""

import bisect

from ebbtide import _core

STATES, WEIGHTS, GRADIENTS = "lms.optimizer", "lms.weights", "lms.gradients"  # csrc/torch/lms/*.cpp


class HostRanges:
    """Address ranges of LMS's tags that are on the host."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._begins = [begin for begin, _ in ranges]
        self._ends = [end for _, end in ranges]

    @staticmethod
    def are_any() -> bool:
        """Whether there are any now."""
        return any(status.host_bytes for tag in (STATES, WEIGHTS, GRADIENTS) if (status := _core.query_tag(tag)))

    @classmethod
    def now(cls) -> "HostRanges | None":
        """None: there are none."""
        ranges = []
        for tag in (STATES, WEIGHTS, GRADIENTS):
            status = _core.query_tag(tag)
            if status is None or not status.host_bytes:
                continue
            for info in _core.allocations(tag):
                if info.host_bytes == info.size_bytes:
                    ranges.append((info.address, info.address + info.size_bytes))
                elif info.host_bytes:
                    begin = info.address
                    for address, size_bytes, place, _ in _core.stretches(begin, info.size_bytes):
                        if place == "host":
                            ranges.append((address, address + size_bytes))
        return cls(sorted(ranges)) if ranges else None

    def holds_any(self, address: int, size_bytes: int) -> bool:
        """Whether some of these bytes are on the host."""
        index = bisect.bisect_right(self._ends, address)
        return index < len(self._begins) and self._begins[index] < address + size_bytes
