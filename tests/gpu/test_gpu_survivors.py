"""saver.survivors on a GPU: torch's memory history tells where each survivor was made."""

import pytest

torch = pytest.importorskip("torch")

MIB = 1 << 20


def make(size_bytes):
    return torch.ones(size_bytes, dtype=torch.uint8, device="cuda")


@pytest.fixture
def history():
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def test_a_survivor_shows_where_it_was_made(saver, tag, history):
    with saver.region(tag):
        kept = make(64 * MIB)
    (row,) = saver.survivors(tag)
    assert row.address == kept.data_ptr()
    assert "test_gpu_survivors.py" in row.made_at[0] and row.made_at[0].endswith("in make")
    assert "in test_a_survivor_shows_where_it_was_made" in row.made_at[1]


def test_without_the_history_it_is_listed_without_frames(saver, tag):
    with saver.region(tag):
        kept = make(64 * MIB)
    (row,) = saver.survivors(tag)
    assert (row.address, row.made_at) == (kept.data_ptr(), ())


def test_the_memory_of_a_graph_is_listed(saver, tag):
    x = torch.ones(16 * MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=saver.graph_pool(tag)):
        y = x * 2
    rows = saver.survivors(tag)
    assert y.data_ptr() in {row.address for row in rows}
    del y, graph
