"""The core knows of a capture while it lasts, however it ends. A class stands in for torch's graphs."""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.pools import backends, captures, region_pools  # noqa: E402
from ebbtide.saver.regions import graphs, startup  # noqa: E402


class Allocator:
    """Records the calls to torch's allocator about a capture."""

    is_broken_open = False
    last = None

    def __init__(self):
        type(self).last = self
        self.forgotten = []

    def make_pool(self):
        return (0, 10**6)

    def is_capturing(self):
        return type(self).is_broken_open

    def forget(self, pool_id):
        self.forgotten.append(pool_id)


def make_graph_class():
    class Graph:
        fails_at = None
        allocations_inside = None

        def capture_begin(self, pool=None, capture_error_mode="global"):
            "begins"
            if self.fails_at == "begin":
                raise RuntimeError("planted begin")
            self.pool_id = pool

        def capture_end(self):
            if self.fails_at == "end":
                raise RuntimeError("planted end")

    captures._wrap(Graph, Allocator)
    return Graph


@pytest.fixture
def graph_class():
    yield make_graph_class()
    assert not captures.is_capturing()


def assert_operations_run(saver):
    saver.pause()
    saver.resume()


def assert_operations_are_refused(saver, tag):
    for call in (lambda: saver.pause(tag), lambda: saver.resume(tag), saver.pause):
        with pytest.raises(StateError, match="captur"):
            call()
    with pytest.raises(StateError, match="captur"):
        saver.adopt(torch.ones(3, device=saver.device), tag=tag)


def test_invariant_9_no_operation_while_a_capture_runs(saver, tag, graph_class):
    with saver.region(tag):
        keep = torch.ones(1000, device=saver.device)
    graph = graph_class()
    graph.capture_begin(capture_error_mode="relaxed")
    assert captures.is_capturing()
    assert_operations_are_refused(saver, tag)
    graph.capture_end()
    assert_operations_run(saver)
    assert float(keep.sum()) == 1000
    assert graph_class.capture_begin.__doc__ == "begins"


def test_two_captures(saver, tag, graph_class):
    with saver.region(tag):
        pass
    first, second = graph_class(), graph_class()
    first.capture_begin()
    second.capture_begin()
    first.capture_end()
    assert_operations_are_refused(saver, tag)
    second.capture_end()
    assert_operations_run(saver)


@pytest.mark.parametrize("fails_at", ["begin", "end"])
def test_a_failed_capture_ends_too(saver, graph_class, fails_at):
    graph = graph_class()
    graph.fails_at = fails_at
    with pytest.raises(RuntimeError, match=f"planted {fails_at}"):
        graph.capture_begin()
        graph.capture_end()
    assert_operations_run(saver)
    graph.fails_at = None
    graph.capture_begin()
    graph.capture_end()
    assert_operations_run(saver)


@pytest.mark.parametrize(
    ("fails_at", "given", "forgotten"),
    [
        ("begin", None, [(0, 10**6)]),
        ("begin", (0, 7), []),  # others may use it
        ("end", None, [(0, 10**6)]),
        ("end", (0, 7), [(0, 7)]),
        (None, None, []),
    ],
)
def test_torchs_allocator_is_told_of_a_failed_capture(graph_class, fails_at, given, forgotten):
    graph = graph_class()
    graph.fails_at = fails_at
    try:
        graph.capture_begin(given, capture_error_mode="relaxed")
        graph.capture_end()
    except RuntimeError:
        assert fails_at
    assert Allocator.last.forgotten == forgotten


def test_an_end_that_may_be_tried_again(saver, graph_class, monkeypatch):
    """torch refuses to end a capture on another stream than the one it began on."""
    graph = graph_class()
    graph.capture_begin(pool=None)
    graph.fails_at = "end"
    monkeypatch.setattr(Allocator, "is_broken_open", True)
    with pytest.raises(RuntimeError):
        graph.capture_end()
    assert captures.is_capturing() and not Allocator.last.forgotten
    graph.fails_at = None
    graph.capture_end()
    assert_operations_run(saver)


def test_an_allocator_that_does_not_answer_ends_the_capture(saver, graph_class, monkeypatch):
    def fail(self):
        raise RuntimeError("planted question")

    graph = graph_class()
    graph.capture_begin()
    graph.fails_at = "end"
    monkeypatch.setattr(Allocator, "is_capturing", fail)
    with pytest.raises(RuntimeError, match="planted"):
        graph.capture_end()
    assert_operations_run(saver)


def test_a_graph_that_is_dropped_ends_its_capture(saver, graph_class):
    graph = graph_class()
    graph.capture_begin()
    del graph
    gc.collect()
    assert_operations_run(saver)


def test_a_graph_that_is_dropped_by_another_thread(saver, tag, graph_class):
    with saver.region(tag):
        box = [graph_class()]
        box[0].capture_begin()
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        gc.collect()
        assert not captures.is_capturing()
    tensor = torch.ones(10, device=saver.device)
    assert _core.find(tensor.data_ptr()) is None
    assert_operations_run(saver)


def test_beginning_twice_counts_once(saver, graph_class):
    graph = graph_class()
    graph.capture_begin()
    graph.capture_begin()
    graph.capture_end()
    assert_operations_run(saver)
    graph.capture_end()
    assert_operations_run(saver)


def test_a_capture_leaves_the_regions_of_its_thread(saver, tag, graph_class):
    graph = graph_class()
    with saver.region(tag):
        graph.capture_begin()
        inside = torch.ones(10, device=saver.device)
        graph.capture_end()
        after = torch.ones(10, device=saver.device)
    assert _core.find(inside.data_ptr()) is None
    assert _core.find(after.data_ptr()).tag == tag


def test_the_workspace_map_is_emptied_before_a_capture_and_not_during_one(saver, tag, graph_class, monkeypatch):
    calls = []
    monkeypatch.setattr(captures.workspaces, "clear", lambda: calls.append(captures.is_capturing()))
    graph = graph_class()
    graph.capture_begin()
    with pytest.raises(StateError):
        saver.pause()
    graph.capture_end()
    assert calls == [False]


def test_a_capture_into_a_named_pool_leases_its_tag(saver, tag, graph_class, monkeypatch):
    with saver.region(tag):
        keep = torch.ones(1000, device=saver.device)
    monkeypatch.setattr(captures, "_tagged", {})
    captures.name_pool((0, 77), tag, region_pools.RegionPool(FakePool((0, 77)), 0, epoch=0))
    graph = graph_class()
    for begin in (lambda: graph.capture_begin((0, 77)), lambda: graph.capture_begin(pool=(0, 77))):
        begin()
        assert saver.tags()[tag].lease_count == 1
        assert FakePool.active == 1
        graph.capture_end()
        assert FakePool.active == 0
        assert saver.tags()[tag].lease_count == 0
    saver.pause(tag)
    with pytest.raises(StateError, match="is paused"):
        graph.capture_begin(pool=(0, 77))
    assert not captures.is_capturing()
    assert saver.tags()[tag].lease_count == 0
    saver.resume(tag)
    graph.capture_begin(pool=(0, 77))
    graph.capture_end()
    assert float(keep.sum()) == 1000


def test_graphs_need_a_gpu(saver, tag):
    if saver.device == "cuda":
        return
    with pytest.raises(StateError, match="needs a GPU"):
        saver.graph_pool(tag)
    with pytest.raises(StateError, match="needs a GPU"):
        saver.cuda_graph(object(), tag).__enter__()


def test_a_pool_of_ones_own_is_refused(saver, tag):
    with pytest.raises(TypeError, match="graph_pool"):
        saver.cuda_graph(object(), tag, pool=(0, 1)).__enter__()


class FakePool:
    active = 0

    def __init__(self, key):
        self.id = key

    def activation(self):
        return (backends.PoolUse(ActiveNow, (), ()),)


class ActiveNow:
    def __init__(self):
        FakePool.active += 1

    def __del__(self):
        FakePool.active -= 1


class FakeBackend:
    device_type = "cuda"
    inner_beats_all = True
    one_thread_only = False

    def __init__(self):
        self.made = 0

    def make(self, slot, device, tag):
        self.made += 1
        return FakePool((0, 1000 + self.made))

    def suspension(self):
        return ()


@pytest.fixture
def fake_cuda(saver, monkeypatch):
    """cuda_graph with a backend and a torch.cuda.graph that only record their calls."""
    graph_class = make_graph_class()

    class GraphContext:
        def __init__(self, graph, pool=None, **arguments):
            self.graph, self.pool, self.arguments = graph, pool, arguments

        def __enter__(self):
            self.graph.capture_begin(self.pool)
            self.graph.seen = self.arguments

        def __exit__(self, *_):
            self.graph.capture_end()

    assert saver.device  # starts the real backend first, because regions of other tests use it
    backend = FakeBackend()
    monkeypatch.setattr(backends, "_backend", backend)
    monkeypatch.setattr(graphs, "_pools", {})
    monkeypatch.setattr(captures, "_tagged", {})
    monkeypatch.setattr(graphs, "registry", region_pools.RegionPools())
    monkeypatch.setattr(torch.cuda, "graph", GraphContext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    return graph_class


def capture(saver, graph, tag, **options):
    with saver.cuda_graph(graph, tag, **options):
        with pytest.raises(StateError):
            saver.pause(tag)
    return graph.pool_id


def test_each_graph_has_a_pool_of_its_own_that_is_used_again(saver, tag, tag2, fake_cuda):
    first, second = fake_cuda(), fake_cuda()
    ids = [
        capture(saver, first, tag, stream="s"),
        capture(saver, second, tag),
        capture(saver, first, tag),
        capture(saver, fake_cuda(), tag2),
    ]
    assert ids[0] == ids[2]
    assert len(set(ids)) == 3
    assert first.seen == {}
    assert saver.tags()[tag].lease_count == 0
    del second
    gc.collect()
    assert capture(saver, fake_cuda(), tag) == ids[1]
    shared = saver.graph_pool(tag)
    assert shared == saver.graph_pool(tag) not in ids
    assert saver.graph_pool(tag2) != shared
    assert saver.graph_pool(tag, backup=None) != shared


def test_arguments_reach_torch(saver, tag, fake_cuda):
    graph = fake_cuda()
    capture(saver, graph, tag, stream="s", capture_error_mode="relaxed")
    assert graph.seen == {"stream": "s", "capture_error_mode": "relaxed"}


def test_an_exception_in_the_capture_leaves_nothing_open(saver, tag, fake_cuda):
    with pytest.raises(KeyError), saver.cuda_graph(fake_cuda(), tag):
        raise KeyError
    assert saver.tags()[tag].lease_count == 0
    saver.pause(tag)


def capture_beside(graph, pool, tag, backup="ram"):
    with graphs.cuda_graph_in_place_of(pool, graph, tag, backup, {"stream": "s"}):
        assert _core.query_tag(tag).lease_count > 0
    assert graph.seen == {"stream": "s"}
    return graph.pool_id


def test_a_pool_of_the_caller_is_replaced_by_one_that_its_graphs_share(saver, tag, tag2, fake_cuda):
    kept = [fake_cuda() for _ in range(7)]
    made = [
        capture_beside(kept[0], (0, 1), tag),
        capture_beside(kept[1], (0, 1), tag),
        capture_beside(kept[2], (0, 2), tag),
        capture_beside(kept[3], (0, 1), tag2),
        capture_beside(kept[4], (0, 1), tag, None),
        capture_beside(kept[5], None, tag),
    ]
    assert made[0] == made[1]
    assert len(set(made)) == 5
    assert saver.graph_pool(tag) not in made
    # A pool of ours, which the caller got from a graph, is used as it is.
    assert capture_beside(kept[6], list(made[3]), tag2) == made[3]


def test_a_replaced_pool_that_is_paused_refuses_the_capture(saver, tag, fake_cuda):
    graph = fake_cuda()
    capture_beside(graph, (0, 1), tag)
    address = _core.alloc(tag, 1 << 21, 0, 1)
    saver.pause(tag)
    with pytest.raises(StateError, match=f"graph pool of tag '{tag}' is paused"):
        capture_beside(fake_cuda(), (0, 1), tag)
    saver.resume(tag)
    capture_beside(fake_cuda(), (0, 1), tag)
    _core.free(address)


def test_where_ebbtide_is_off_the_callers_pool_is_used(saver, tag, fake_cuda, monkeypatch):
    monkeypatch.setattr(startup, "backend", lambda: None)
    graph = fake_cuda()
    with graphs.cuda_graph_in_place_of((0, 1), graph, tag, "ram", {}):
        pass
    assert graph.pool_id == (0, 1)
