"""The segments of a pool, by torch's report, as plain values, checked before anything relies on them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Range = tuple[int, int]  # address, bytes


class Segment(NamedTuple):
    """One allocation of ours, as torch has cut it. `free`: the ranges that torch would hand out again."""

    address: int
    size_bytes: int
    free: tuple[Range, ...]

    @property
    def is_free(self) -> bool:
        """Nothing in it is in use."""
        return sum([size for _, size in self.free]) == self.size_bytes


def make_segment(address: int, size_bytes: int, blocks: Iterable[tuple[int, int, bool]]) -> Segment:
    """A segment from its blocks: (address, bytes, whether it is free), in order.

    Raises:
        ValueError: the blocks do not tile the segment.
    """
    end = address
    free = []
    for start, size, is_free in blocks:
        if start != end or size <= 0:
            raise ValueError(f"a block at {start:#x} of {size} bytes does not follow on {end:#x}")
        end += size
        if is_free:
            free.append((start, size))
    if end != address + size_bytes:
        raise ValueError(f"the blocks of the segment at {address:#x} are not as long as it is")
    return Segment(address, size_bytes, tuple(free))


def read_cuda_segments(snapshot: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """The segments in a result of `torch.cuda.memory_snapshot`. A freed block that waits for a stream counts as used.

    Raises:
        KeyError, TypeError, ValueError: the snapshot has an unknown format.
    """
    return [
        make_segment(
            segment["address"],
            segment["total_size"],
            [(block["address"], block["size"], block["state"] == "inactive") for block in segment["blocks"]],
        )
        for segment in snapshot
    ]


def free_ranges(segments: Iterable[Segment]) -> list[Range]:
    """All free ranges, by address."""
    return sorted([free for segment in segments for free in segment.free])


def are_apart(ranges: Sequence[Range]) -> bool:
    """Whether these ranges, sorted by address, are disjoint."""
    return all(start + size <= after for (start, size), (after, _) in pairwise(ranges))
