"""CUDA graphs whose memory is paused and resumed, and captures that operations must not break (invariant 9)."""

from collections.abc import Callable


def test_a_captured_graph_replays_right_after_pause_and_resume(program: Callable[..., str]) -> None:
    program(
        """
with saver.region("weights"):
    layer = torch.nn.Linear(512, 512, device="cuda")
    static = torch.randn(64, 512, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side), torch.no_grad():
    layer(static)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), saver.cuda_graph(graph, tag="graphs"):
    out = layer(static).relu() + 1
graph.replay(); torch.cuda.synchronize()
want = (layer(static).relu() + 1).detach()
assert torch.allclose(out, want, atol=1e-4)
held = saver.tags()
report = saver.pause("weights", "graphs")
assert report.by_tag["graphs"] > 0, report
saver.resume()
with torch.no_grad():
    static.copy_(torch.randn(64, 512, device="cuda"))
graph.replay(); torch.cuda.synchronize()
assert torch.allclose(out, (layer(static).relu() + 1).detach(), atol=1e-4)
for _ in range(3):
    saver.pause(); saver.resume(); graph.replay()
torch.cuda.synchronize()
assert torch.allclose(out, (layer(static).relu() + 1).detach(), atol=1e-4)
"""
    )


def test_a_captured_graph_replays_right_over_demoted_memory(program: Callable[..., str]) -> None:
    """Kernels, copies and memsets of the graph meet its memory on the device and on the host in turn."""
    program(
        """
with saver.region("weights"):
    weight = torch.randn(1 << 20, device="cuda")
    static = torch.randn(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with saver.cuda_graph(graph, tag="graphs"):
    copied = torch.empty_like(static)
    copied.copy_(static)
    cleared = torch.ones_like(static)
    cleared.zero_()
    out = weight * copied + cleared
for round in range(3):
    for move in (saver.demote, saver.promote):
        move("weights", "graphs")
        static.copy_(torch.randn(1 << 20, device="cuda"))
        weight.add_(1)
        graph.replay(); torch.cuda.synchronize()
        assert torch.equal(out, weight * static), (round, move.__name__)
        assert torch.equal(copied, static) and not cleared.any()
assert saver.demote("weights", "graphs").bytes > 0
"""
    )


def test_state_that_replays_never_write_comes_back(program: Callable[..., str]) -> None:
    program(
        """
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with saver.cuda_graph(graph):
    counter = torch.zeros(1024, device="cuda")
    running = counter + 0
    running += 1
graph.replay(); torch.cuda.synchronize()
running.fill_(41)
saver.pause("graphs"); saver.resume("graphs")
assert (running == 41).all()
"""
    )


def test_graph_pool_with_torch_cuda_graph(program: Callable[..., str]) -> None:
    program(
        """
x = torch.ones(1 << 20, device="cuda")
pool = saver.graph_pool("mine")
assert pool == saver.graph_pool("mine")
graphs = []
for k in range(2):
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, pool=pool):
        y = x * (k + 2)
    graphs.append((g, y, k + 2))
for g, y, factor in graphs:
    g.replay(); torch.cuda.synchronize()
    assert (y == factor).all()
assert saver.pause("mine").bytes > 0
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
        x * 5
    raise SystemExit("captured into a paused pool")
except ebbtide.StateError as error:
    assert "mine" in str(error)
saver.resume("mine")
for g, y, factor in graphs:
    g.replay(); torch.cuda.synchronize()
    assert (y == factor).all()
"""
    )


def test_invariant_9_a_pause_beside_a_capture_is_refused_and_the_capture_is_whole(program: Callable[..., str]) -> None:
    program(
        """
with saver.region("weights"):
    w = torch.randn(1 << 22, device="cuda")
x = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
inside, done, seen = threading.Event(), threading.Event(), []
def other():
    inside.wait()
    try:
        saver.pause("weights")
    except ebbtide.StateError as error:
        seen.append(str(error))
    done.set()
thread = threading.Thread(target=other); thread.start()
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    y = x + 1
    inside.set(); assert done.wait(60)
    z = y * 2
thread.join()
assert seen and "capture" in seen[0], seen
g.replay(); torch.cuda.synchronize()
assert (z == 4).all()
assert saver.pause("weights").bytes > 0
saver.resume("weights")
"""
    )


def test_a_failed_capture_leaves_a_process_that_works_and_ends_with_0(program: Callable[..., str]) -> None:
    program(
        """
with saver.region("weights"):
    w = torch.randn(1 << 20, device="cuda")
g = torch.cuda.CUDAGraph()
try:
    with saver.cuda_graph(g, tag="graphs"):
        y = torch.ones(1 << 20, device="cuda")
        y.sum().item()  # forbidden in a capture
    raise SystemExit("the capture did not fail")
except RuntimeError:
    pass
torch.cuda.synchronize()
assert saver.pause("weights").bytes > 0
saver.resume("weights")
assert torch.isfinite(w).all()
"""
    )


def test_allocations_and_frees_of_regions_during_a_capture(program: Callable[..., str]) -> None:
    program(
        """
x = torch.ones(1 << 20, device="cuda")
with saver.region("scratch"):
    old = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
def worker():
    with saver.region("scratch"):
        seen.append(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))
seen = []
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g, capture_error_mode="thread_local"):
    y = x + 1
    thread = threading.Thread(target=worker); thread.start(); thread.join()
    address = ebbtide._core.alloc("raw", 8 * MIB)
    ebbtide._core.free(address)  # put off: a synchronisation would break the capture
    z = y * 2
g.replay(); torch.cuda.synchronize()
assert (z == 4).all() and len(seen) == 1
assert ebbtide._core.stats()["deferred_frees"] == 0
"""
    )
