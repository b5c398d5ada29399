"""The cost of a call on some tags does not grow with the number of other tags: no call walks the tables of all tags.

Nothing here measures time. The core's own share is counted in tests/cpp/many_tags_test.cpp.
"""

import ctypes
import pickle
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.pools import backends, cuda_pools, pool_segments, region_pools  # noqa: E402
from ebbtide.saver.state import hooks  # noqa: E402

MIB = 2**20
SEGMENT = 20 * MIB  # what the allocators of torch and of the simulated device take for a tensor of 4 MiB


@pytest.fixture
def tables(monkeypatch):
    """The names of the calls that returned a whole table."""
    asked = []
    tags, allocations = _core.tags, _core.allocations

    def all_tags():
        asked.append("tags")
        return tags()

    def some_allocations(tag=None):
        if tag is None:
            asked.append("allocations")
        return allocations(tag)

    monkeypatch.setattr(_core, "tags", all_tags)
    monkeypatch.setattr(_core, "allocations", some_allocations)
    return asked


@pytest.fixture
def looks(saver, monkeypatch):
    """The pools that were examined."""
    seen = []
    assert saver.device  # starts the backend, which no earlier test may have done
    backend = backends.existing_backend()
    look = backend.segments_of
    monkeypatch.setattr(backend, "segments_of", lambda pools: (seen.extend(pools), look(pools))[1], raising=False)
    return seen


def make(saver, tag, **arguments):
    with saver.region(tag, **arguments):
        return torch.ones(MIB, device=saver.device)


CALLS = {
    "is_paused": lambda saver, tag, tensor: saver.is_paused(tag),
    "region": lambda saver, tag, tensor: make(saver, tag),
    "an overflowing region": lambda saver, tag, tensor: make(saver, tag, overflow="split"),
    "pause and resume": lambda saver, tag, tensor: (saver.pause(tag), saver.resume(tag)),
    "pause without a backup": lambda saver, tag, tensor: (saver.pause(tag, backup=None), saver.resume(tag)),
    "resume in the background": lambda saver, tag, tensor: (
        saver.pause(tag),
        saver.resume(tag, wait=False, order=tensor).wait(),
    ),
    "backup_of": lambda saver, tag, tensor: (saver.pause(tag), saver.backup_of(tensor), saver.resume(tag)),
    "swap": lambda saver, tag, tensor: (
        make(saver, f"{tag}-other"),
        saver.pause(f"{tag}-other"),
        saver.swap(pause=tag, resume=f"{tag}-other"),
        saver.resume(tag),
    ),
    "paused": lambda saver, tag, tensor: saver.paused(tag).__enter__() and saver.resume(tag),
    "prepare": lambda saver, tag, tensor: saver.prepare(tag, wait=False).wait(),
    "trim": lambda saver, tag, tensor: saver.trim(tag),
    "promote": lambda saver, tag, tensor: saver.promote(tag),
    "demote": lambda saver, tag, tensor: saver.demote(tag),
    "missing_ok": lambda saver, tag, tensor: (
        saver.trim(tag, f"{tag}-unknown", missing_ok=True),
        saver.promote(tag, f"{tag}-unknown", missing_ok=True),
        saver.demote(tag, f"{tag}-unknown", missing_ok=True),
    ),
}


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_table_of_everything_for_a_call_about_one_tag(saver, tag, tag2, tables, looks, call, hooked):
    kept = make(saver, tag), make(saver, tag2)
    removals = (
        [saver.on(event, each, lambda _: None) for event in hooks.AROUND for each in (tag, "*")] if hooked else []
    )
    try:
        call(saver, tag, kept[0])
    finally:
        for remove in removals:
            remove()
    assert tables == []
    others = {id(pool) for key, pool in region_pools.registry.idle() if not key.tag.startswith(tag) or key.tag == tag2}
    assert not {id(pool) for pool in looks} & others


def test_an_unknown_tag_is_an_error_that_lists_the_known_ones(saver, tag, tag2, tables):
    kept = make(saver, tag)
    calls = (saver.is_paused, saver.trim, saver.promote, saver.demote)
    for call in (*calls, lambda unknown: saver.prepare(unknown, wait=False)):
        with pytest.raises(StateError, match=tag2) as caught:
            call(tag2)
        assert tag in str(caught.value)
    assert kept.numel()


def test_query_tag_says_what_the_table_says(saver, tag):
    assert _core.query_tag(tag) is None
    kept = make(saver, tag, retain=True)
    gone = [make(saver, tag, backup=None), make(saver, tag)]
    del gone

    def expect_equal():
        one = _core.query_tag(tag)
        (other,) = [info for info in _core.tags() if info.tag == tag]
        fields = [name for name in dir(one) if not name.startswith("_")]
        assert {name: getattr(one, name) for name in fields} == {name: getattr(other, name) for name in fields}
        infos = _core.allocations(tag)
        assert one.allocation_count == len(infos)
        for name in ("size_bytes", "resident_bytes", "stored_bytes", "host_bytes"):
            assert getattr(one, name) == sum(getattr(info, name) for info in infos), name

    for act in (saver.pause, saver.resume, saver.trim, saver.resume, saver.prepare, saver.pause):
        expect_equal()
        act(tag)
    with saver.region(tag):
        expect_equal()
    operation = _core.claim("resume", [tag])
    expect_equal()
    operation.commit()
    expect_equal()
    assert kept.numel()


def test_what_is_left_is_a_value_like_any_other(saver, tag, tag2):
    kept = make(saver, tag), make(saver, tag2)
    report, again = saver.pause(tag), saver.pause(tag)
    saver.pause(tag2)
    assert [held.bytes for held in report.remaining if held.tag == tag2] == [SEGMENT], "as of its own end"
    assert isinstance(report.remaining, tuple) and report.remaining is report.remaining
    assert pickle.loads(pickle.dumps(again)) == again
    assert pickle.loads(pickle.dumps(report)).remaining == report.remaining
    assert saver.Report("pause").remaining == ()
    assert "on devices now" in str(report)
    assert len(kept) == 2


def test_hooks_of_a_tag_and_of_all_run_in_the_order_in_which_they_were_added(saver, tag, tag2):
    kept = make(saver, tag), make(saver, tag2)
    ran = []
    removals = [
        saver.on("before_pause", each, lambda paused, number=number: ran.append((number, paused)))
        for number, each in enumerate(("*", tag, tag2, "*", tag))
    ]
    try:
        saver.pause(tag)
        assert ran == [(0, tag), (1, tag), (3, tag), (4, tag)]
        removals[1]()
        removals[3]()
        ran.clear()
        saver.pause(tag2)
        assert ran == [(0, tag2), (2, tag2)]
    finally:
        for remove in removals:
            remove()
    assert not hooks.wants(hooks.AROUND)
    assert len(kept) == 2


@pytest.mark.parametrize("count", [3, 40])
def test_torch_is_asked_at_once_about_many_pools(monkeypatch, count):
    asked = []

    def memory_snapshot(mempool_id=None):
        asked.append(mempool_id)
        return []

    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot)
    backend = cuda_pools.CudaPools.__new__(cuda_pools.CudaPools)
    pools = [SimpleNamespace(id=(0, number)) for number in range(count)]
    assert backend.segments_of(pools) == [[]] * count
    assert asked == ([pool.id for pool in pools] if count <= cuda_pools.FEW_POOLS else [None])


def test_pools_that_torch_does_not_understand_have_no_known_segments(saver, tag, monkeypatch):
    kept = make(saver, tag)
    pools = [pool for _, pool in region_pools.registry.idle([tag])]
    assert all(pool_segments.look_at(pools).values())
    monkeypatch.setattr(backends.existing_backend(), "segments_of", lambda pools: 1 / 0, raising=False)
    assert pool_segments.look_at(pools) == dict.fromkeys(pools)
    assert len(kept) == MIB


def test_one_snapshot_is_split_by_pool(monkeypatch):
    def segment(address, pool_id):
        block = {"address": address, "size": 8, "state": "inactive"}
        return {"address": address, "total_size": 8, "blocks": [block], "segment_pool_id": pool_id}

    asked = []

    def memory_snapshot(mempool_id=None):
        asked.append(mempool_id)
        return [segment(8, (0, 1)), segment(16, (0, 0)), segment(24, (0, 2)), segment(32, (0, 1))]

    class Pool:
        def __init__(self, number):
            self.id = (0, number)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot)
    monkeypatch.setattr(cuda_pools, "FEW_POOLS", 1)
    backend = cuda_pools.CudaPools.__new__(cuda_pools.CudaPools)
    found = backend.segments_of([Pool(2), Pool(1), Pool(3)])
    assert [[one.address for one in segments] for segments in found] == [[24], [8, 32], []]
    assert asked == [None]

    def memory_snapshot_before_2_9():
        return []

    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot_before_2_9)
    assert backend.segments_of([Pool(1)]) == [None], "torch before 2.9 does not tell which segments are a pool's"


def test_a_snapshot_that_takes_references_harms_no_pool(monkeypatch):
    """torch 2.11 releases a reference to each number of the id that it is given, without having taken one."""

    class Pool:
        id = (0, int("100000"))  # not one of the small integers that CPython caches

    def memory_snapshot(mempool_id=None):
        for number in mempool_id:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
        return []

    monkeypatch.setattr(torch.cuda, "memory_snapshot", memory_snapshot)
    backend = cuda_pools.CudaPools.__new__(cuda_pools.CudaPools)
    pool = Pool()
    before = sys.getrefcount(pool.id[1])
    for _ in range(before + 10):
        assert backend.segments_of([pool]) == [[]]
    assert sys.getrefcount(pool.id[1]) >= before


def test_hundreds_of_tags(saver, tag):
    """On a GPU, torch gives their pools numbers beyond 256, which CPython does not cache."""
    names = [f"{tag}-{number}" for number in range(300)]
    tensors = []
    for name in names:
        with saver.region(name):
            tensors.append(torch.full((300,), float(len(tensors)), device=saver.device))
    for _ in range(3):
        for name in names[-50:]:
            saver.pause(name)
            saver.resume(name)
    assert [float(tensor[-1]) for tensor in tensors] == list(range(300))
