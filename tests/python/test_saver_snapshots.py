"""torch's snapshot of a pool as plain values: known shapes are read, and all others are refused."""

import pytest
from ebbtide.saver.values.segments import Segment, are_apart, free_ranges, make_segment, read_cuda_segments
from hypothesis import given
from hypothesis import strategies as st


def block(address, size, state):
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": []}


def segment(address, *blocks):
    return {"address": address, "total_size": sum(one["size"] for one in blocks), "blocks": list(blocks), "stream": 0}


def test_only_inactive_blocks_are_free():
    read = read_cuda_segments(
        [
            segment(
                1000,
                block(1000, 10, "inactive"),
                block(1010, 20, "active_allocated"),
                block(1030, 30, "active_pending_free"),
                block(1060, 40, "active_awaiting_free"),
                block(1100, 50, "some state of the future"),
                block(1150, 60, "inactive"),
            ),
            segment(500, block(500, 8, "inactive")),
        ]
    )
    assert read[0].free == ((1000, 10), (1150, 60))
    assert [one.is_free for one in read] == [False, True]
    assert free_ranges(read) == [(500, 8), (1000, 10), (1150, 60)]


@pytest.mark.parametrize(
    "snapshot",
    [
        [{}],
        [{"address": 1}],
        ["text"],
        [None],
        3,
        [segment(0, block(8, 8, "inactive"))],
        [segment(0, block(0, 8, "inactive"), block(16, 8, "inactive"))],
        [segment(0, block(0, 8, "inactive"), block(4, 8, "inactive"))],
        [{**segment(0, block(0, 8, "inactive")), "total_size": 16}],
        [segment(0, block(0, 0, "inactive"))],
        [segment(0, {"address": 0, "size": 8})],
        [{**segment(0), "total_size": 8}],
        [{"address": None, "total_size": 8, "blocks": [block(0, 8, "inactive")]}],
    ],
    ids=lambda snapshot: str(snapshot)[:40],
)
def test_other_shapes_are_refused(snapshot):
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_cuda_segments(snapshot)


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans()), min_size=1, max_size=20), st.integers(0, 1 << 40))
def test_free_ranges_are_apart_and_sum_up(blocks, start):
    placed, address = [], start
    for size, is_free in blocks:
        placed.append((address, size, is_free))
        address += size
    read = make_segment(start, address - start, placed)
    free = free_ranges([read, Segment(address + 5, 10, ((address + 7, 2),))])
    assert are_apart(free) and free == sorted(free)
    assert sum(size for _, size in free) == sum(size for size, is_free in blocks if is_free) + 2
    assert read.is_free == all(is_free for _, is_free in blocks)


def test_what_overlaps_is_not_apart():
    assert are_apart([]) and are_apart([(0, 4), (4, 4)])
    assert not are_apart([(0, 5), (4, 4)])
