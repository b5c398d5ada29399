"""A capture in the place of the caller's pool: what the caller sees when it names its own pool.

SGLang with symmetric memory ends its graph pool inside of a capture and begins it again, and looks for the segments of
that pool. Classes and functions stand in for torch's.
"""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import backends, captures, region_pools, stand_ins  # noqa: E402
from ebbtide.saver.regions import graphs  # noqa: E402
from ebbtide.saver.state import program  # noqa: E402
from ebbtide.torch_support import torch_names  # noqa: E402
from ebbtide.torch_support.allocator_settings import EXPANDABLE_SEGMENTS_FROM  # noqa: E402
from ebbtide.torch_support.versions import torch_version  # noqa: E402
from test_saver_captures import FakeBackend, make_graph_class  # noqa: E402

MINE = (0, 7)  # the caller's pool


class Torch:
    """torch's allocator: what was called with which pool, and its segments."""

    def __init__(self, monkeypatch):
        self.calls, self.segments = [], []
        for name in torch_names.POOL_FUNCTIONS:
            monkeypatch.setattr(torch._C, name, self._recorder(name), raising=False)
        # As `from torch._C import` in torch.cuda.memory leaves it.
        monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", torch._C._cuda_releasePool, raising=False)
        snapshot = self.memory_snapshot
        for module in (torch.cuda, torch.cuda.memory):
            monkeypatch.setattr(module, "memory_snapshot", snapshot)

    def _recorder(self, name):
        def function(device, mempool_id):
            self.calls.append((name.removeprefix("_cuda_"), device, tuple(mempool_id)))

        return function

    def memory_snapshot(self, mempool_id=None, include_traces=True):
        wanted = [one for one in self.segments if mempool_id in (None, one["segment_pool_id"])]
        return wanted if include_traces else [{**one, "traces": "none"} for one in wanted]


@pytest.fixture
def fake(saver, monkeypatch):
    """torch's allocator and `torch.cuda.graph`."""
    graph_class = make_graph_class()

    class GraphContext:
        def __init__(self, graph, pool=None):
            self.graph, self.pool = graph, pool

        def __enter__(self):
            self.graph.capture_begin(self.pool)

        def __exit__(self, *_):
            self.graph.capture_end()

    assert saver.device  # starts the real backend first, because regions of other tests use it
    monkeypatch.setattr(backends, "_backend", FakeBackend())
    monkeypatch.setattr(graphs, "_pools", {})
    monkeypatch.setattr(captures, "_tagged", {})
    monkeypatch.setattr(graphs, "registry", region_pools.RegionPools())
    monkeypatch.setattr(stand_ins, "_known", {})
    monkeypatch.setattr(stand_ins, "_installed", False)
    monkeypatch.setattr(torch.cuda, "graph", GraphContext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    made = Torch(monkeypatch)
    made.graph_class = graph_class
    return made


@pytest.fixture
def preloaded(monkeypatch):
    monkeypatch.setattr(program, "_has_hooks", True)


def capture(fake, tag, inside=lambda: None):
    graph = fake.graph_class()
    with graphs.cuda_graph_in_place_of(MINE, graph, tag, "ram", {}):
        inside()
    return graph.pool_id


def leave_and_come_back():
    """SGLang's SymmetricMemoryContext."""
    torch._C._cuda_endAllocateToPool(0, MINE)
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, list(MINE))
    torch.cuda.memory._cuda_releasePool(0, MINE)


def names_of(pool):
    return [("endAllocateToPool", 0, pool), ("beginAllocateCurrentThreadToPool", 0, pool), ("releasePool", 0, pool)]


def test_in_a_capture_the_callers_pool_means_the_one_that_is_captured_into(fake, tag, tag2):
    ours = capture(fake, tag, leave_and_come_back)
    assert ours != MINE and fake.calls == names_of(ours)
    fake.calls.clear()
    others = capture(fake, tag2, leave_and_come_back)
    assert others not in (ours, MINE) and fake.calls == names_of(others)
    fake.calls.clear()
    torch._C._cuda_endAllocateToPool(1, MINE)
    leave_and_come_back()
    assert fake.calls == [("endAllocateToPool", 1, MINE), *names_of(MINE)]


def test_another_pool_or_device_is_not_concerned(fake, tag):
    def elsewhere():
        torch._C._cuda_endAllocateToPool(1, MINE)
        torch._C._cuda_endAllocateToPool(0, (0, 8))

    capture(fake, tag, elsewhere)
    assert fake.calls == [("endAllocateToPool", 1, MINE), ("endAllocateToPool", 0, (0, 8))]


def test_ebbtide_itself_gets_torchs_own_functions(fake, tag):
    before = torch_names.find("_C._cuda_releasePool")
    capture(fake, tag)
    assert torch._C._cuda_releasePool is not before is torch_names.find("_C._cuda_releasePool")


def test_a_snapshot_of_the_callers_pool_has_the_segments_of_its_stand_ins(fake, tag, tag2):
    ours, others = capture(fake, tag), capture(fake, tag2)
    fake.segments = [{"address": n, "segment_pool_id": one} for n, one in enumerate([(0, 0), MINE, ours, others])]

    def addresses(*args, **kwargs):
        return [segment["address"] for segment in torch.cuda.memory_snapshot(*args, **kwargs)]

    assert addresses(MINE) == addresses(mempool_id=MINE, include_traces=False) == addresses(MINE, False) == [1, 2, 3]
    assert [one["traces"] for one in torch.cuda.memory.memory_snapshot(MINE, include_traces=False)] == ["none"] * 3
    assert addresses() == [0, 1, 2, 3] and addresses(ours) == [2] and addresses((0, 9)) == []


def test_a_capture_that_fails_leaves_the_callers_pool_alone(fake, tag):
    with pytest.raises(KeyError):
        capture(fake, tag, lambda: {}["planted"])
    leave_and_come_back()
    assert fake.calls == names_of(MINE)


def test_a_second_capture_of_the_pool_takes_nothing_from_the_first(fake, tag, tag2):
    def begin_another():
        second = fake.graph_class()
        second.fails_at = "begin"  # torch: already recording
        with pytest.raises(RuntimeError), graphs.cuda_graph_in_place_of(MINE, second, tag2, "ram", {}):
            pass
        leave_and_come_back()

    ours = capture(fake, tag, begin_another)
    assert fake.calls[-3:] == names_of(ours)


def test_in_a_preloaded_program_the_callers_pool_is_captured_into_and_tagged(fake, tag, preloaded):
    seen = []

    def look():
        seen.append(_core.thread_policy())
        leave_and_come_back()

    before = _core.thread_policy()
    assert capture(fake, tag, look) == MINE
    assert [policy[:2] for policy in seen] == [(_core.TAGGING_ON, tag)]
    assert fake.calls == names_of(MINE) and _core.thread_policy() == before


@pytest.mark.parametrize(
    ("world_size", "backends", "variable", "warned"),
    [
        (2, "cpu:gloo,cuda:nccl", None, 1),
        (2, "cuda:nccl", "1", 1),
        (2, "cuda:nccl", "0", 0),
        (1, "cuda:nccl", None, 0),
        (2, "cpu:gloo,cuda:gloo", None, 0),
    ],
)
@pytest.mark.parametrize("has_hooks", [False, True])
def test_nccl_must_not_register_the_buffers_of_graphs_that_are_paused(
    fake, tag, monkeypatch, recwarn, world_size, backends, variable, warned, has_hooks
):
    monkeypatch.setattr(program, "_has_hooks", has_hooks)
    monkeypatch.setattr(captures, "_has_warned", False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if variable is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", variable)
    capture(fake, tag)
    capture(fake, tag)
    assert ["NCCL_GRAPH_REGISTER=0" in str(one.message) for one in recwarn] == [True] * warned


def test_expandable_segments_pass_the_preload_library_by(fake, tag, preloaded, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Before torch 2.13 ebbtide keeps them off.
    is_off = torch_version(torch.__version__) < EXPANDABLE_SEGMENTS_FROM
    assert (capture(fake, tag) == MINE) == is_off
