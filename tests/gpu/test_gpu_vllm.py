"""vLLM's allocator over ebbtide on a GPU: graphs, a full device, and a load that converts its weights."""

import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide.integrations import vllm_allocator  # noqa: E402

pytestmark = pytest.mark.device_memory

MIB = 1 << 20


@pytest.fixture
def allocator(saver, tag, monkeypatch):
    monkeypatch.setattr(vllm_allocator, "PREFIX", f"{tag}.")
    made = vllm_allocator.Allocator()
    yield made
    saver.resume()
    gc.collect()
    made.release_pools()


def is_any_awake(allocator):
    return any(not each.is_asleep for each in allocator.pointer_to_data.values())


def test_a_graph_outside_of_the_pools_replays_after_a_sleep(allocator):
    with allocator.use_memory_pool():
        weight = torch.eye(1024, device="cuda")
    with allocator.use_memory_pool("discard"):
        cache = torch.empty(1024, 1024, device="cuda")

    def model(x):
        out = x @ weight
        cache[: out.size(0)].copy_(out)
        return out + 1

    x = torch.rand(128, 1024, device="cuda")
    model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    before = torch.cuda.mem_get_info()[0]
    allocator.sleep()
    assert not is_any_awake(allocator) and torch.cuda.mem_get_info()[0] > before
    allocator.wake_up()
    x.random_()
    graph.replay()
    assert torch.allclose(x, cache[: x.size(0)]) and torch.allclose(y, x + 1)


@pytest.mark.parametrize("kept", [vllm_allocator.KEPT_AT_EVERY_LEVEL, ("weights", *vllm_allocator.KEPT_AT_EVERY_LEVEL)])
def test_a_graph_in_the_graph_pool_sleeps_and_keeps_its_constants(allocator, kept):
    with allocator.use_memory_pool("weights"):
        weight = torch.full((4 * MIB,), 2.0, device="cuda")
    x = torch.ones_like(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool):
        constant = torch.empty_like(x)  # no replay writes it
        y = x * weight + constant
    constant.fill_(3.0)
    allocator.sleep(offload_tags=kept)
    assert not is_any_awake(allocator)
    allocator.wake_up(["kv_cache"])
    assert {each.tag for each in allocator.pointer_to_data.values() if each.is_asleep} == {"weights"}
    allocator.wake_up(["weights"])
    weight.fill_(2.0)  # as a reload does
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 5.0))


def test_a_wake_up_into_a_full_device_raises_and_can_be_repeated(allocator):
    torch.cuda.empty_cache()
    size_bytes = int(torch.cuda.mem_get_info()[0] * 0.7)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    allocator.sleep(offload_tags=())
    filler = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        allocator.wake_up()
    del filler
    allocator.wake_up()
    assert not cache[:MIB].any() and not cache[-MIB:].any()


def test_a_load_that_replaces_its_weights_needs_little_more_than_one_copy(allocator):
    """Without the trims the pool keeps the tensors that each step has replaced: torch frees nothing of an open pool."""
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    least = before
    with allocator.use_memory_pool("weights"):
        weights = [torch.ones(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        for index in range(8):
            weights[index] = torch.ones(80 * MIB, dtype=torch.uint8, device="cuda")
            least = min(least, torch.cuda.mem_get_info()[0])
            allocator.trim()
    assert before - least <= (8 * 80 + 64 + 16) * MIB
