"""The CUDA backend against models of torch's pool routing in each supported version, without a GPU."""

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.pools import backends, captures, cuda_pools, region_pools  # noqa: E402
from ebbtide.saver.reclaim import spilled, torch_cache  # noqa: E402
from ebbtide.saver.regions import entry  # noqa: E402
from ebbtide.saver.regions.region import separate_memory  # noqa: E402
from ebbtide.saver.state import program  # noqa: E402
from ebbtide.saver.values.segments import Segment  # noqa: E402
from ebbtide.torch_support.versions import LEAST_TORCH, NEWEST_TORCH  # noqa: E402
from torch_model import TorchModel  # noqa: E402

VERSIONS = [(2, minor) for minor in range(LEAST_TORCH[1], NEWEST_TORCH[1] + 1)]


@pytest.fixture(params=VERSIONS, ids=lambda version: ".".join(map(str, version)))
def model(request, saver, monkeypatch):
    assert saver.device  # starts the real backend first, because regions of other tests use it
    model = TorchModel(request.param)
    model.dissolved = set()
    model.install(monkeypatch)
    monkeypatch.setattr(backends, "_backend", cuda_pools.CudaPools(request.param))
    monkeypatch.setattr(entry, "registry", region_pools.RegionPools())
    yield model
    assert model.recording == {0: [], 1: []}
    # One use is that of the pool object. The other is released only when the pool is dissolved.
    assert {key for key, count in model.use_counts.items() if count != 2} == model.freeable
    assert model.freeable == model.dissolved
    assert model.deadly_ends == []
    assert model.device == 0


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(30)
    return result[0]


def test_each_device_has_a_pool_made_on_it(model, saver, tag):
    with saver.region(tag):
        inside = [model.route(device) for device in (0, 1)]
        assert [device for device in (0, 1) if inside[device] is not None] == list(model.covered)
        assert len(set(inside)) == 2
    assert {p.mem_pool.made_on for p in (e.handle for es in entry.registry._pools.values() for e in es)} == set(
        model.covered
    )
    assert model.route(0) is None
    assert model.route(1) is None


def test_inner_wins_and_outer_comes_back(model, saver, tag, tag2):
    with saver.region(tag):
        outer = model.route()
        with saver.region(tag2):
            inner = model.route()
            with saver.region(tag):
                innermost = model.route()
            assert model.route() == inner
        assert model.route() == outer
        with saver.disabled():
            assert model.route() is None
            with saver.region(tag2):
                assert model.route() == inner
            assert model.route() is None
        assert model.route() == outer
    assert len({outer, inner, innermost, None}) == 4


def test_pools_are_entered_again(model, saver, tag):
    seen = set()
    for _ in range(4):
        with saver.region(tag):
            seen.add(model.route())
    assert len(seen) == 1


def test_separate_memory_is_torchs_in_pools_that_die(model, saver, tag, tag2, monkeypatch):
    flushes = []
    monkeypatch.setattr(torch_cache, "empty", lambda: flushes.append(set(model.freeable)))
    inside = []
    for scope in (separate_memory(), separate_memory()):
        with saver.region(tag):
            outer = model.route()
            with scope:
                own = {model.route(device) for device in model.covered}
                with saver.region(tag2):
                    assert model.route() not in own | {outer}
                _core.reenter()  # as a pause of a pauseable program does
                assert {model.route(device) for device in model.covered} == own and outer not in own
            assert model.route() == outer
        inside.append(own)
    assert inside[0].isdisjoint(inside[1]) and None not in inside[0]
    assert flushes == [inside[0], inside[0] | inside[1]]  # torch may free what is in them
    model.dissolved |= inside[0] | inside[1]


def test_separate_memory_ends_with_an_exception_and_is_refused_to_nobody(model, saver, monkeypatch):
    flushes = []
    monkeypatch.setattr(torch_cache, "empty", lambda: flushes.append(None))
    with pytest.raises(KeyError):
        with separate_memory():
            model.dissolved |= {model.route(device) for device in model.covered}
            raise KeyError
    assert model.route() is None and flushes == [None]


def test_in_a_pauseable_program_disabled_takes_nothing_from_torchs_cache(model, saver, monkeypatch):
    monkeypatch.setattr(program, "_own", program.Program("job", 1))
    with saver.disabled():
        own = {model.route(device) for device in model.covered}
    assert None not in own
    model.dissolved |= own


def dissolve_all(tag):
    with entry.registry.withheld([tag]) as withheld:
        for _, pool in withheld:
            pool.is_dissolved = backends._backend.dissolve(pool.handle)
        return [pool.handle.id for _, pool in withheld if pool.is_dissolved]


def test_dissolved_pools_are_torchs_to_free(model, saver, tag, tag2):
    with saver.region(tag):
        first = model.route()
    with saver.region(tag2):  # pools may be open meanwhile
        model.dissolved |= set(dissolve_all(tag))
    assert len(model.dissolved) == (2 if model.may_die_in_use else 0)
    with saver.region(tag):
        assert (model.route() == first) is not model.may_die_in_use
    assert len(entry.registry.dissolved()) == len(model.dissolved)
    model.dissolved |= set(dissolve_all(tag))  # once more: no pool is dissolved twice
    assert len(model.dissolved) == (4 if model.may_die_in_use else 0)


def test_the_pools_of_one_backup_are_dissolved(model, saver, tag, monkeypatch):
    monkeypatch.setattr(spilled, "registry", entry.registry)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *_, include_traces: [])

    def pools(backup):
        with saver.region(tag, backup=backup):
            return {model.route(device) for device in model.covered}

    first, second = pools("ram"), pools(None)
    spilled.dissolve(tag, 1)
    gone = first if model.may_die_in_use else set()
    assert pools(None) == second and (pools("ram") == first) == (not gone)
    model.dissolved |= gone


def test_a_pool_that_somebody_else_uses_is_not_dissolved(model, saver, tag):
    with saver.region(tag):
        first = model.route()
    model.use_counts[first] += 1  # as if a graph had been captured into it
    model.dissolved |= set(dissolve_all(tag))
    model.use_counts[first] -= 1
    assert first not in model.dissolved
    with saver.region(tag):
        assert model.route() == first


def test_giving_back_is_torchs_flush(model, monkeypatch):
    flushes = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: flushes.append(1))
    backend = backends._backend
    backend.give_back([])
    assert flushes == []
    backend.give_back(["a pool"])
    assert flushes == [1]


@pytest.mark.parametrize("is_capturing", [True, False])
def test_nothing_is_given_back_during_a_capture(saver, tag, monkeypatch, is_capturing):
    given, pool = [], region_pools.RegionPool("a pool", 0, epoch=0, is_dissolved=True)
    registry = region_pools.RegionPools()
    registry.add(region_pools.PoolKey(tag, 1, 0), pool)
    monkeypatch.setattr(spilled, "registry", registry)
    monkeypatch.setattr(backends, "_backend", SimpleNamespace(give_back=given.append))
    monkeypatch.setattr(spilled, "look_at", lambda *_: {pool: [Segment(4096, 512, ((4096, 512),))]})
    monkeypatch.setattr(captures, "is_capturing", lambda: is_capturing)
    assert spilled.release_dissolved([tag]) == []
    assert given == ([] if is_capturing else [["a pool"]])
    assert registry.dissolved() == [(region_pools.PoolKey(tag, 1, 0), pool)]  # its segments still exist


def test_threads_all_and_what_is_inside(model, saver, tag, tag2):
    if not model.by_thread:
        with pytest.raises(StateError, match=r'threads="all".*torch 2.8'):
            saver.region(tag, threads="all").__enter__()
        assert saver.tags()[tag].lease_count == 0
        return
    with saver.region(tag2):
        own = model.route()
        with saver.region(tag, threads="all"):
            everyone = model.route()
            assert in_thread(model.route) == everyone
            with saver.region(tag2):
                inner = model.route()
                assert inner not in (own, everyone, None)
                assert in_thread(model.route) == (everyone if model.newest_first else None)
            assert model.route() == everyone == in_thread(model.route)
            with saver.disabled():
                assert model.route() is None
                assert in_thread(model.route) is None
            assert model.route() == everyone
        assert model.route() == own
        assert in_thread(model.route) is None


def test_out_of_order_ends(model, saver, tag, tag2):
    first, second = saver.region(tag), saver.region(tag2)
    first.__enter__()
    outer = model.route()
    second.__enter__()
    inner = model.route()
    first.__exit__(None, None, None)
    assert model.route() == inner != outer
    second.__exit__(None, None, None)
    assert model.route() is None


def test_two_threads(model, saver, tag, tag2):
    def inside():
        with saver.region(tag2):
            return model.route()

    with saver.region(tag):
        mine = model.route()
        if model.by_thread:
            other = in_thread(inside)
            assert other not in (mine, None)
        else:
            with pytest.raises(StateError, match=r"before 2\.8"):
                in_thread_raising(inside)
        assert model.route() == mine
    assert in_thread(inside) is not None


def in_thread_raising(function):
    errors = []

    def run():
        try:
            function()
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    raise errors[0]


def test_a_failure_while_entering_leaves_nothing_open(model, saver, tag, tag2, monkeypatch):
    backend = backends._backend
    begin = backend._begin
    last = model.covered[-1]
    with saver.region(tag2):
        outer = model.route(0), model.route(1)

        def fail_on_the_last_device(device, key):
            if device == last and key not in outer:
                raise RuntimeError("planted")
            begin(device, key)

        with saver.region(tag):
            pass  # makes the pools
        monkeypatch.setattr(backend, "_begin", fail_on_the_last_device)
        with pytest.raises(RuntimeError, match="planted"):
            saver.region(tag).__enter__()
        assert (model.route(0), model.route(1)) == outer
        assert saver.tags()[tag].lease_count == 0
        monkeypatch.setattr(backend, "_begin", begin)
        with saver.region(tag):
            assert model.route(last) not in (None, outer[last])
    assert model.route() is None


def test_a_backend_without_pools_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(StateError, match="no pools"):
        cuda_pools.make_backend()
