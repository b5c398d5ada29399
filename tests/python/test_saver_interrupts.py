"""Ctrl-C at every point of entering and leaving: the operation is done completely or not at all."""

import gc
import os
import signal
import sys
import time

import pytest

torch = pytest.importorskip("torch")

import ebbtide  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import backends, captures, region_pools  # noqa: E402
from ebbtide.saver.regions import graphs  # noqa: E402
from ebbtide.saver.regions.region import Tagged, separate_memory  # noqa: E402
from interrupts import AtPoint, Planted, interrupted_everywhere  # noqa: E402
from test_saver_captures import FakeBackend  # noqa: E402


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def make(saver):
    return torch.ones(300, device=saver.device)


def assert_outside(saver, *tags):
    """Asserts that this thread is in no region, nothing is leased, and each tag can be paused, resumed and entered."""
    assert tag_of(make(saver)) is None
    assert _core.capture_count() == 0
    assert not _core.others_in_regions()
    known = {info.tag: info for info in _core.tags()}
    for tag in tags:
        if tag in known:
            assert known[tag].lease_count == 0
            saver.pause(tag)
            saver.resume(tag)
        with saver.region(tag):
            assert tag_of(make(saver)) == tag
        assert tag_of(make(saver)) is None


def scopes(saver, tag, tag2):
    region, inner = saver.region(tag), saver.region(tag2)

    def plain():
        with region:
            make(saver)

    def nested():
        with region:
            with saver.disabled():
                with inner, region:
                    make(saver)

    def all_threads():
        with saver.region(tag, threads="all"), saver.region(tag2):
            make(saver)

    def overflowing():
        with saver.region(tag, overflow="split"):
            make(saver)

    def decorated():
        region(lambda: make(saver))()

    @region
    def steps():
        yield make(saver)
        yield make(saver)

    def decorated_generator():
        for _ in steps():
            make(saver)

    def inside():
        with region:
            yield make(saver)
            yield make(saver)

    def generator():
        going = inside()
        next(going)
        going.close()

    return {
        function.__name__: function
        for function in (plain, nested, all_threads, overflowing, decorated, decorated_generator, generator)
    }


NAMES = ("plain", "nested", "all_threads", "overflowing", "decorated", "decorated_generator", "generator")


@pytest.mark.parametrize("name", NAMES)
def test_regions_are_whole(saver, tag, tag2, name):
    work = scopes(saver, tag, tag2)[name]
    work()  # makes everything that is made at first use
    assert interrupted_everywhere(work, lambda: assert_outside(saver, tag, tag2)) > 20


def test_memory_of_its_own_and_a_tag_without_pools_are_whole(saver, tag, tag2):
    region, inner = saver.region(tag), saver.region(tag2)

    def work():
        with region:
            with separate_memory():
                with inner, Tagged(tag, 1):
                    make(saver)

    before = _core.thread_policy()  # other tests may have left one, as programs of torch_memory_saver do
    work()
    assert interrupted_everywhere(work, lambda: assert_outside(saver, tag, tag2)) > 20
    assert _core.thread_policy() == before


def test_a_first_entry_is_whole(saver, tag):
    numbers = iter(range(10**6))
    names = []

    def work():
        names.append(f"{tag}-{next(numbers)}")
        with saver.region(names[-1]):
            make(saver)

    interrupted_everywhere(work, lambda: assert_outside(saver, *names[-1:]))


def test_the_outer_region_goes_on(saver, tag, tag2):
    inner = saver.region(tag2)

    def work():
        with inner:
            make(saver)

    def check():
        assert tag_of(make(saver)) == tag

    with saver.region(tag):
        work()
        interrupted_everywhere(work, check)
    assert_outside(saver, tag, tag2)


@pytest.mark.timeout(400)  # some 350 pauses, and as many resumes
def test_paused_is_whole(saver, tag):
    """Memory that was paused before stays paused. The rest is back bit for bit, and each before-hook had one
    after-hook."""
    with saver.region(tag):
        away = torch.full((3 << 20,), 5, dtype=torch.uint8, device=saver.device)
    saver.pause(tag)
    with saver.region(tag):
        here = torch.full((1000,), 7, dtype=torch.uint8, device=saver.device)
    ran = {event: [] for event in ("before_pause", "after_pause", "before_resume", "after_resume")}
    # Hooks are built-in functions, because an interrupt inside a hook would be that of the hook.
    removers = [saver.on(event, tag, ran[event].append) for event in ran]

    def work():
        with saver.paused(tag):
            assert _core.is_away(here.data_ptr(), 1000)

    def check():
        assert not _core.is_away(here.data_ptr(), 1000)
        assert int(here.sum()) == 7000
        assert _core.is_away(away.data_ptr(), 3 << 20)
        assert _core.capture_count() == 0
        counts = {event: len(calls) for event, calls in ran.items()}
        assert counts["before_pause"] + counts["before_resume"] == counts["after_pause"] + counts["after_resume"]
        for calls in ran.values():
            calls.clear()

    work()
    check()
    try:
        assert interrupted_everywhere(work, check) > 20
    finally:
        for remove in removers:
            remove()
    saver.resume(tag)
    assert int(away[-1]) == 5
    assert_outside(saver, tag)


def test_adopt_is_whole(saver, tag, tag2, mover):
    """Each tensor is whole in its old or its new place, and nothing is leased."""
    with saver.region(tag2):
        from_tag = torch.full((1000,), 3.0, device=saver.device)
    ordinary = torch.full((1000,), 4.0, device=saver.device)
    view = ordinary[10:]
    turns = [tag, tag2]

    def work():
        saver.adopt([from_tag, ordinary], tag=turns[0])

    def check():
        turns.reverse()
        assert float(from_tag.sum()) == 3000 and float(ordinary.sum()) == 4000
        assert view.data_ptr() == ordinary[10:].data_ptr()
        assert tag_of(from_tag) in (tag, tag2)
        assert_outside(saver, tag, tag2)

    work()
    check()
    interrupted_everywhere(work, check)


@pytest.fixture
def fake_cuda(saver, monkeypatch):
    streams = ["the caller's"]

    class Allocator(captures._TorchAllocator):
        capturing = None

        def __init__(self):
            pass

        def make_pool(self):
            return (0, 10**6)

        def is_capturing(self):
            return Allocator.capturing is not None

        def forget(self, pool_id):
            pass

    class Graph:
        def capture_begin(self, pool=None):
            Allocator.capturing = self

        def capture_end(self):
            Allocator.capturing = None

    captures._wrap(Graph, Allocator)

    class GraphContext:
        def __init__(self, graph, pool=None):
            self.graph, self.pool = graph, pool

        def __enter__(self):
            streams.append("its own")
            self.graph.capture_begin(self.pool)

        def __exit__(self, *_):
            self.graph.capture_end()
            streams.pop()

    assert saver.device
    backend = FakeBackend()
    monkeypatch.setattr(backends, "_backend", backend)
    monkeypatch.setattr(graphs, "_pools", {})
    monkeypatch.setattr(captures, "_tagged", {})
    monkeypatch.setattr(graphs, "registry", region_pools.RegionPools())
    monkeypatch.setattr(torch.cuda, "graph", GraphContext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.__setitem__(slice(None), [stream]))
    Graph.streams, Graph.allocator = streams, Allocator
    return Graph


def test_cuda_graph_is_whole(saver, tag, fake_cuda):
    def work():
        with saver.cuda_graph(fake_cuda(), tag):
            pass

    def check():
        assert fake_cuda.allocator.capturing is None
        assert not captures.is_capturing()
        assert _core.capture_count() == 0
        assert saver.tags()[tag].lease_count == 0 if tag in {info.tag for info in _core.tags()} else True
        assert fake_cuda.streams == ["the caller's"]

    work()
    check()
    interrupted_everywhere(work, check)


def test_a_capture_that_began_is_not_forgotten(saver, tag, fake_cuda):
    """Whatever interrupts torch's begin or end, ebbtide and the stream agree about the capture."""
    graphs_made = []

    def work():
        graphs_made.append(fake_cuda())
        graphs_made[-1].capture_begin()
        graphs_made[-1].capture_end()

    def check():
        is_capturing = fake_cuda.allocator.capturing is not None
        assert captures.is_capturing() == is_capturing == (_core.capture_count() == 1)
        if is_capturing:
            graphs_made[-1].capture_end()
        assert not captures.is_capturing() and _core.capture_count() == 0

    work()
    interrupted_everywhere(work, check)


def test_withheld_and_preloaded_are_whole(saver, tag, monkeypatch):
    with saver.region(tag):
        make(saver)
    idle = len(region_pools.registry.idle())

    def withhold():
        with region_pools.registry.withheld([tag]) as chosen:
            assert chosen

    def check():
        assert len(region_pools.registry.idle()) == idle

    interrupted_everywhere(withhold, check)
    before = dict(os.environ)
    monkeypatch.setattr("ebbtide.launch.preloading.env", lambda **_: {"EBBTIDE_A": "1", "EBBTIDE_B": "2"})

    def preload():
        with ebbtide.preloaded(overflow="split"):
            assert dict(os.environ) != before

    def check_environment():
        assert dict(os.environ) == before

    interrupted_everywhere(preload, check_environment)


def test_a_second_entry_with_an_interrupt_pending_in_the_block(saver, tag):
    """The interrupt of the block itself is raised, and the region is left."""
    sys.setprofile(None)
    with pytest.raises(Planted):
        with saver.region(tag):
            sys.setprofile(AtPoint(1))
            make(saver)
    sys.setprofile(None)
    assert_outside(saver, tag)


def test_real_signals_at_many_moments(saver, tag, tag2):
    """SIGALRM, whose handler raises, at 300 moments during entering, leaving, pausing and adopting."""
    data = torch.full((1000,), 2.0, device=saver.device)
    saver.adopt(data, tag=tag)
    region = saver.region(tag2)

    def raise_it(*_):
        raise Planted

    def work(pauses):
        # A function of its own: an interrupt as such a loop goes back skips a `try` around it (ebbtide.locks).
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with region, saver.disabled():
                pass
            if pauses:
                with saver.paused(tag):
                    pass

    before = signal.signal(signal.SIGALRM, raise_it)
    arrived = 0
    gc.disable()  # Python drops exceptions in the callbacks of the collector, and pytest's plugins have such callbacks
    try:
        for trial in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1e-5 * (trial * 37 % 300))
                work(trial % 3 == 0)
            except Planted:
                arrived += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert float(data.sum()) == 2000
            if trial % 10 == 0:
                assert_outside(saver, tag, tag2)
            assert tag_of(make(saver)) is None
            assert all(info.lease_count == 0 for info in _core.tags())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert arrived == 300
    assert_outside(saver, tag, tag2)
