"""Programs under `ebbtide run --pauseable`: all of torch's memory is paused and resumed, and no thread gets paused
memory."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

PRELUDE = """
import threading
import torch
from ebbtide import _core, saver
MIB = 1 << 20
def free(): torch.cuda.synchronize(); return torch.cuda.mem_get_info()[0]
def info_of(tensor): return _core.find(tensor.data_ptr())
def tag_of(tensor): return info_of(tensor).tag
def is_away(tensor): return _core.is_away(tensor.data_ptr(), tensor.nbytes)
def in_thread(function):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(function()))
    thread.start(); thread.join()
    return seen[0]
"""

TRAINING = """
import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(2048, 2048), torch.nn.GELU())))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(8, 512, 2048).cuda()
for step in range(8):
    optimizer.zero_grad()
    loss = (model(data[step]) - data[step]).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
    between(step)
"""

PAUSE_BETWEEN = """
import torch
from ebbtide import saver
def between(step):
    if step % 3 == 1:
        before = torch.cuda.mem_get_info()[0]
        reserved = torch.cuda.memory_reserved()
        saver.pause()
        assert torch.cuda.mem_get_info()[0] - before >= 0.9 * reserved
        assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
        saver.resume()
"""


def run_command(command: list[str], **variables: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def program() -> Callable[..., str]:
    """Runs a pauseable program with the names of the prelude defined. Options are those of `ebbtide.env`."""

    def run(code: str, **options: object) -> str:
        import ebbtide

        variables = ebbtide.env(pauseable=True, **options)
        return run_command([sys.executable, "-c", PRELUDE + textwrap.dedent(code)], **variables)

    return run


@pytest.mark.device_memory
@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
def test_a_training_script_loses_nothing(backup: str) -> None:
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    plain = run_command([sys.executable, "-c", "def between(step): pass\n" + TRAINING], **deterministic)
    run = [sys.executable, "-m", "ebbtide.cli", "run", "--pauseable", "--tag", "default", "--backup", backup, "--"]
    paused = run_command([*run, sys.executable, "-c", PAUSE_BETWEEN + TRAINING], **deterministic)
    assert paused == plain


@pytest.mark.device_memory
def test_memory_that_is_away_is_not_handed_out(program: Callable[..., str]) -> None:
    """No thread gets it, autograd's threads included, although torch's cache has blocks of exactly these sizes."""
    program(
        """
sizes = [1 << 10, 1 << 19, 3 << 20, 12 << 20, 40 << 20]
kept = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in sizes]
del [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes * 3][:]
leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
before = free()
report = saver.pause("default")
assert all(map(is_away, kept)) and is_away(leaf)
assert report.bytes > 160 * MIB and abs(free() - before - report.bytes) < 64 * MIB, report
def fill():
    made = [torch.full((size,), 9, dtype=torch.uint8, device="cuda") for size in sizes * 3]
    torch.cuda.synchronize()
    assert not any(map(is_away, made))
    assert {tag_of(one) for one in made} == {"default"}
    return made
mine, others = fill(), in_thread(fill)
other_leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
(other_leaf * 3).sum().backward()
torch.cuda.synchronize()
assert not is_away(other_leaf.grad)
saver.resume("default")
for one in mine + others:
    assert (one == 9).all()
for one in kept:
    assert (one == 7).all()
assert (other_leaf.grad == 3).all()
(leaf * 2).sum().backward()
assert (leaf.grad == 2).all()
again = saver.pause("default")
assert is_away(mine[-1]) and is_away(others[0])
saver.resume()
assert (mine[-1] == 9).all()
""",
        tag="default",
    )


def test_free_blocks_are_not_copied(program: Callable[..., str]) -> None:
    program(
        """
kept = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device="cuda")
want = kept.cpu()
junk = torch.randint(0, 256, (256 * MIB,), dtype=torch.uint8, device="cuda")
del junk
report = saver.pause()
assert report.unused >= 256 * MIB, report
assert report.copied < 128 * MIB, report
saver.resume()
assert torch.equal(kept.cpu(), want)
"""
    )


def test_graphs_of_torchs_own_pools_replay(program: Callable[..., str]) -> None:
    program(
        """
static = torch.randn(1 << 20, device="cuda")
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    (static * 2).relu()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    state = torch.zeros(1 << 20, device="cuda")
    temporary = static * 2
    out = temporary.relu() + 1
    del temporary
graph.replay()
torch.cuda.synchronize()
state.fill_(41)  # no replay after this one leaves it
for cycle in range(3):
    saver.pause()
    assert is_away(out) and is_away(state)
    saver.resume()
    assert (state == 41).all()
    static.copy_(torch.randn(1 << 20, device="cuda"))
    graph.replay()
    assert torch.equal(out, (static * 2).relu() + 1)
    state.fill_(41)
""",
        tag="job",
    )


def test_a_capture_while_the_tag_is_away(program: Callable[..., str]) -> None:
    """Its memory belongs to the graph, not to the bypass pool, which other allocations use after the capture."""
    program(
        """
old = torch.ones(4 * MIB, device="cuda")
saver.pause()
static = torch.ones(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = static * 2 + 1
graph.replay()
assert (out == 3).all()
saver.resume()
noise = [torch.full((1 << 20,), 5.0, device="cuda") for _ in range(8)]
static.fill_(2)
graph.replay()
assert (out == 5).all() and all((one == 5).all() for one in noise)
saver.pause(); saver.resume()
static.fill_(3)
graph.replay()
assert (out == 7).all() and (old == 1).all() and all((one == 5).all() for one in noise)
"""
    )


def test_regions_keep_their_tags(program: Callable[..., str]) -> None:
    program(
        """
plain = torch.ones(4 * MIB, device="cuda")
with saver.region("inner"):
    first = torch.ones(1 << 20, device="cuda")
    saver.pause("default")
    second = torch.ones(1 << 20, device="cuda")
    elsewhere = in_thread(lambda: torch.ones(1 << 20, device="cuda"))
with saver.region("inner"):
    third = torch.ones(1 << 20, device="cuda")
assert [tag_of(one) for one in (plain, first, second, third, elsewhere)] == [
    "default", "inner", "inner", "inner", "default"]
saver.pause("inner")
assert is_away(first) and is_away(third) and not is_away(elsewhere)
saver.resume("default")
assert is_away(third) and (plain == 1).all() and (elsewhere == 1).all()
saver.resume("inner")
assert (third == 1).all()
"""
    )


def test_only_what_torch_allocates_for_itself_is_tagged(program: Callable[..., str]) -> None:
    """Not the program's own call of the driver, and not torch's allocations in `saver.disabled()`."""
    program(
        """
import ctypes
kept = torch.ones(96 * MIB, dtype=torch.uint8, device="cuda")
driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 * MIB)) == 0
with saver.disabled():
    plain = torch.ones(160 * MIB, dtype=torch.uint8, device="cuda")
assert tag_of(kept) == "default" and info_of(plain) is None and _core.find(address.value) is None
handle = ctypes.create_string_buffer(64)
assert driver.cuIpcGetMemHandle(handle, address) == 0
saver.pause()
assert is_away(kept) and (plain == 1).all()
saver.resume()
assert (kept == 1).all()
assert driver.cuMemFree_v2(address) == 0
"""
    )


def test_a_graph_that_is_captured_in_a_region_has_its_tag(program: Callable[..., str]) -> None:
    program(
        """
static = torch.ones(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with saver.region("graphs"), torch.cuda.graph(graph):
    out = static * 2 + 1
graph.replay()
torch.cuda.synchronize()
assert tag_of(out) == "graphs" and tag_of(static) == "default"
saver.pause("graphs")
assert is_away(out) and not is_away(static)
saver.resume("graphs")
assert (out == 3).all()
static.fill_(2)
graph.replay()
assert (out == 5).all()
"""
    )


@pytest.mark.device_memory
def test_cycles_leave_nothing_behind(program: Callable[..., str]) -> None:
    program(
        """
kept = torch.ones(16 * MIB, device="cuda")
def cycle():
    saver.pause()
    del [torch.ones(MIB, device="cuda") for _ in range(16)][:]
    saver.resume()
    torch.cuda.empty_cache()
cycle()
want = free()
for _ in range(20):
    cycle()
assert want - free() < 32 * MIB
assert torch.cuda.memory_reserved() < 128 * MIB
assert (kept == 1).all()
"""
    )


@pytest.mark.device_memory
def test_memory_cached_meanwhile_makes_room_for_the_resume(program: Callable[..., str]) -> None:
    program(
        """
kept = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
saver.pause()
torch.ones(384 * MIB, dtype=torch.uint8, device="cuda").sum()
torch.cuda.synchronize()
saver.configure(device_limit=_core.query_device(0).held_bytes + 64 * MIB)
saver.resume()
assert (kept == 1).all()
"""
    )


def test_matmuls_with_workspaces_after_a_cycle(program: Callable[..., str]) -> None:
    program(
        """
a, b = torch.randn(64, 262144, device="cuda"), torch.randn(262144, 64, device="cuda")
want = a @ b
for _ in range(3):
    saver.pause()
    torch.ones(8 * MIB, device="cuda")
    saver.resume()
    torch.testing.assert_close(a @ b, want)
"""
    )


def test_an_asynchronous_resume(program: Callable[..., str]) -> None:
    program(
        """
kept = torch.randint(0, 256, (512 * MIB,), dtype=torch.uint8, device="cuda")
want = kept.cpu()
junk = torch.ones(64 * MIB, device="cuda"); del junk
saver.pause()
with saver.resume(wait=False):
    made = in_thread(lambda: torch.full((64 * MIB,), 3.0, device="cuda"))
assert torch.equal(kept.cpu(), want)
assert (made == 3).all()
saver.pause()
saver.resume(wait=False)
assert torch.equal(kept.cpu(), want)
assert (made == 3).all()
saver.pause(); saver.resume()
assert (made == 3).all()
"""
    )
