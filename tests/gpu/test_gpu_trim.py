"""saver.trim on a GPU: memory that torch caches and nothing uses becomes free for other programs."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError  # noqa: E402

pytestmark = pytest.mark.device_memory

MIB = 1 << 20
SLACK = 8 * MIB  # page tables


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, device="cuda")


def device_free():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_free_segments_go_and_come_back_with_the_next_region(saver, tag):
    keep, gone = noise(saver, tag, 100), [noise(saver, tag, mib) for mib in (300, 64, 12)]
    saver.pause(tag)  # allocates the memory that the first pause keeps
    saver.resume(tag)
    assert not torch.zeros(1, device="cuda").any()  # loads the kernels of torch that are used below
    want, addresses = keep.cpu(), {tensor.data_ptr() for tensor in gone}
    assert saver.trim(tag).bytes == 0
    gone.clear()
    full = device_free()
    report = saver.trim(tag)
    assert (report.kind, report.bytes, report.by_tag) == ("trim", 376 * MIB, {tag: 376 * MIB})
    assert abs(device_free() - full - report.bytes) <= SLACK
    assert not saver.is_paused(tag) and saver.tags()[tag].trimmed_bytes == report.bytes
    assert torch.equal(keep.cpu(), want)
    keep.add_(1)  # in use meanwhile
    want.add_(1)
    saver.pause(tag)
    saver.resume(tag)
    assert saver.tags()[tag].trimmed_bytes == report.bytes  # it stays away
    with saver.region(tag):
        again = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    assert again.data_ptr() in addresses
    assert not again.any()
    assert saver.tags()[tag].trimmed_bytes == 0
    assert abs(device_free() - full) <= SLACK
    assert torch.equal(keep.cpu(), want)


def test_a_block_that_still_waits_for_a_stream_is_in_use(saver, tag):
    side = torch.cuda.Stream()
    with saver.region(tag):
        used = torch.full((64 * MIB,), 5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    used.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        total = used.sum()
    del used
    saver.trim(tag)  # the block may be free or not, but its memory must not go before the sum has run
    side.synchronize()
    assert total.item() == 5 * 64 * MIB
    torch.empty(MIB, dtype=torch.uint8, device="cuda")  # torch checks its events here, but not while a pool is open
    assert saver.trim(tag).bytes >= 64 * MIB


def test_pools_that_a_graph_captured_into_are_not_trimmed(saver, tag):
    x = torch.ones(16 * MIB, device="cuda")
    pool = saver.graph_pool(tag)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        between = x * 2  # torch calls its block free after the capture; each replay writes there
        result = between + 1
        del between
    own = torch.cuda.CUDAGraph()
    with saver.cuda_graph(own, tag=tag):
        other = (x * 3) + 1
    size = saver.tags()[tag].resident_bytes
    assert size > 0
    assert saver.trim(tag).bytes == 0
    for _ in range(2):
        graph.replay()
        own.replay()
        torch.cuda.synchronize()
        assert (result == 3).all() and (other == 4).all()
        assert saver.trim(tag).bytes == 0
        saver.pause(tag)
        saver.resume(tag)
    assert saver.tags()[tag].resident_bytes == size


def test_a_region_of_the_tag_beside_its_graphs_is_trimmed(saver, tag):
    x = torch.ones(16 * MIB, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag=tag):
        result = (x + 1) * 2
    gone = noise(saver, tag, 64)
    del gone
    assert saver.trim(tag).bytes == 64 * MIB
    graph.replay()
    torch.cuda.synchronize()
    assert (result == 4).all()


def test_where_it_does_not_fit_the_region_is_not_entered(saver, tag):
    keep, gone = noise(saver, tag, 100), noise(saver, tag, 300)
    want = keep.cpu()
    del gone
    assert saver.trim(tag).bytes == 300 * MIB
    saver.configure(device_limit=_core.query_device(0).held_bytes + 100 * MIB)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as error, saver.region(tag):
            raise AssertionError("entered")
        assert isinstance(error.value, OutOfMemoryError)
        assert error.value.requested_bytes == 300 * MIB
    status = saver.tags()[tag]
    assert (status.lease_count, status.trimmed_bytes, status.resident_bytes) == (0, 300 * MIB, 100 * MIB)
    ordinary = torch.ones(MIB, device="cuda")  # this thread is in no region
    assert _core.find(ordinary.data_ptr()) is None
    assert torch.equal(keep.cpu(), want)
    assert saver.pause(tag).bytes == 100 * MIB
    saver.resume(tag)
    saver.configure(device_limit=None)
    again = noise(saver, tag, 300)
    assert saver.tags()[tag].trimmed_bytes == 0
    assert again.any() and torch.equal(keep.cpu(), want)
