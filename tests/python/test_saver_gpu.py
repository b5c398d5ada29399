"""Regions, graphs and adoption on a GPU, beside tests/gpu: the memory of captures, and the requirements of adopt."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.torch_support.allocator_settings import EXPANDABLE_SEGMENTS_FROM  # noqa: E402
from ebbtide.torch_support.versions import torch_version  # noqa: E402

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def warmed_up(work):
    """Runs `work` on a side stream, as torch requires before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


def test_a_matmul_in_a_graph_has_a_workspace_of_its_own(saver, tag):
    x, y = torch.randn(64, 262144, device="cuda"), torch.randn(262144, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = x @ y  # gives this stream a workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag=tag, stream=stream):
        result = x @ y
    for _ in range(3):
        saver.pause(tag)
        # These may reuse the memory of the old workspace.
        noise = [torch.randn(4 * MIB, device="cuda") for _ in range(8)]
        x @ y
        saver.resume(tag)
        graph.replay()
        torch.testing.assert_close(result, want)
        assert all(bool(torch.isfinite(n).all()) for n in noise)


def test_graph_pool_and_make_graphed_callables(saver, tag):
    model = torch.nn.Linear(128, 128).cuda()
    sample = torch.randn(16, 128, device="cuda", requires_grad=True)
    want = model(sample).detach().clone()
    graphed = torch.cuda.make_graphed_callables(model, (sample,), pool=saver.graph_pool(tag))
    saver.pause(tag)
    with pytest.raises(StateError, match="paused"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=saver.graph_pool(tag)):
            pass
    saver.resume(tag)
    torch.testing.assert_close(graphed(sample), want)
    graphed(sample).sum().backward()
    assert sample.grad is not None


def test_a_capture_inside_a_region_goes_to_the_graphs_own_pool(saver, tag):
    graph = torch.cuda.CUDAGraph()
    with saver.region(tag):
        inside = torch.ones(1000, device="cuda")
        warmed_up(lambda: inside * 2)
        with torch.cuda.graph(graph):
            result = inside * 2
        after = torch.ones(1000, device="cuda")
    assert (tag_of(inside), tag_of(result), tag_of(after)) == (tag, None, tag)
    graph.replay()
    assert float(result.sum()) == 2000


def test_random_numbers_in_graphs_survive_a_pause(saver, tag):
    with saver.region(tag):
        warm = torch.ones(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drawn = torch.rand(1000, device="cuda")
    saver.pause(tag)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)
    saver.resume(tag)
    assert float(warm.sum()) == 1000


def test_failed_captures_leave_everything_usable(saver, tag):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), saver.cuda_graph(graph, tag=tag):
        torch.ones(1000, device="cuda").sum().item()  # a synchronisation, which a capture forbids
    torch.cuda.synchronize()
    saver.pause()
    saver.resume()
    again = torch.cuda.CUDAGraph()
    data = torch.ones(1000, device="cuda")
    with saver.cuda_graph(again, tag=tag):
        result = data + 1
    again.replay()
    assert float(result.sum()) == 2000


@pytest.mark.device_memory
@pytest.mark.parametrize("whose", ["torch", "ebbtide"])
def test_torch_gives_its_cache_back_after_a_failed_capture(saver, tag, whose):
    """torch by itself would not: when a capture fails, capture_end leaves the allocator in the capture."""
    with saver.region(tag):
        pass  # from here on ebbtide is told of captures
    capture = torch.cuda.graph if whose == "torch" else saver.cuda_graph
    with pytest.raises(RuntimeError), capture(torch.cuda.CUDAGraph()):
        torch.ones(1000, device="cuda").sum().item()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")  # allocated and freed at once
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    # A capture that succeeds takes torch's random number generators out of the failed capture.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(1000, device="cuda")


ENDINGS = {
    "a failed capture, then exit": "fail(); gc.collect()",
    "a failed capture in a tag, a pause, then exit": "fail(); saver.pause()",
    "a failed capture inside nested regions": "with saver.region('a'), saver.region('b'):\n            fail()",
    "a graph of a paused tag": "graph = capture(); saver.pause('g')",
    "a dropped graph of a paused tag": "graph = capture(); saver.pause('g'); del graph; gc.collect()",
    "a capture that never ended": """
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda.CUDAGraph().capture_begin()""",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_every_ending_has_status_0(run_python, ending):
    result = run_python(
        f"""
        import gc
        import torch
        from ebbtide import saver

        data = torch.ones(1000, device="cuda")
        with saver.region("weights"):
            weights = torch.ones(1000, device="cuda")

        def capture():
            graph = torch.cuda.CUDAGraph()
            with saver.cuda_graph(graph, tag="g"):
                graph.result = data * 2
            return graph

        def fail():
            try:
                with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="g"):
                    data.sum().item()
            except RuntimeError:
                pass

        {ending}
    """
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.device_memory
def test_adopt_needs_one_storage_of_extra_memory(saver, tag):
    tensors = [torch.full((64 * MIB,), float(i), device="cuda") for i in range(8)]  # 256 MiB each
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    result = saver.adopt(tensors, tag=tag)
    free_after, _ = torch.cuda.mem_get_info()
    assert result.bytes == 8 * 256 * MIB
    assert free_before - free_after < 256 * MIB + 64 * MIB
    assert {tag_of(t) for t in tensors} == {tag}
    assert [float(t[-1]) for t in tensors] == list(range(8))


@pytest.mark.device_memory
def test_adopt_where_the_device_has_room_for_one_more_storage_only(saver, tag):
    tensors = [torch.full((64 * MIB,), float(i), device="cuda") for i in range(4)]
    ballast = torch.empty(max(0, torch.cuda.mem_get_info()[0] - 700 * MIB), dtype=torch.uint8, device="cuda")
    try:
        saver.adopt(tensors, tag=tag)
    finally:
        del ballast
    assert {tag_of(t) for t in tensors} == {tag}
    assert [float(t[-1]) for t in tensors] == list(range(4))


EXPANDABLE = """
        import ebbtide, torch
        from ebbtide import saver
        def switch(on):
            torch._C.__dict__.get("_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)(
                f"expandable_segments:{on}"
            )
        def check(tag):
            with saver.region(tag):
                tensor = torch.ones(32 << 20, device="cuda")
            address = tensor.data_ptr()
            assert saver.pause(tag).bytes >= 128 << 20
            saver.resume(tag)
            assert tensor.data_ptr() == address and float(tensor[-1]) == 1
"""


def assert_works(result):
    assert result.returncode == 0, result.stderr
    # Regions work beside them from torch 2.13 on.
    is_off = torch_version(torch.__version__) < EXPANDABLE_SEGMENTS_FROM
    assert result.stderr.count("ebbtide: torch's expandable segments are off") == (1 if is_off else 0), result.stderr


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_regions_work_where_expandable_segments_are_on(run_python, variable):
    result = run_python(
        EXPANDABLE
        + """
        before = torch.ones(64 << 20, device="cuda")
        cached = torch.ones(64 << 20, device="cuda")
        del cached
        for tag in ("a", "b"):
            check(tag)
            after = torch.ones(1 << 20, device="cuda")
        assert float(before[-1]) == float(after[-1]) == 1
        del before
        torch.cuda.empty_cache()
    """,
        **{variable: "expandable_segments:True,garbage_collection_threshold:0.9"},
    )
    assert_works(result)


def test_regions_work_where_the_program_switches_expandable_segments_on(run_python):
    """Before the first region, inside, between two, and in another thread: as verl and vLLM do around their pools."""
    result = run_python(
        EXPANDABLE
        + """
        import threading
        before = torch.ones(64 << 20, device="cuda")
        switch(True)
        check("a")
        switch(False)
        switch(True)
        between = torch.ones(64 << 20, device="cuda")
        check("b")
        with saver.region("c"):
            thread = threading.Thread(target=switch, args=(True,))
            thread.start()
            thread.join()
            inside = torch.ones(32 << 20, device="cuda")
        assert saver.pause("c").bytes >= 128 << 20
        saver.resume("c")
        assert float(inside[-1]) == float(between[-1]) == float(before[-1]) == 1
    """
    )
    assert_works(result)


def test_large_model_support_works_where_expandable_segments_are_on(run_python):
    result = run_python(
        """
        import torch
        from ebbtide import lms
        with lms.enable(limit="256MiB"):
            weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
            x = weight
            for _ in range(100):
                x = (x * 1.0).sin()
            x.sum().backward()
            assert weight.grad is not None
    """,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert_works(result)
