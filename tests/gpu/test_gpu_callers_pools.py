"""Captures into a pool that the caller names, as SGLang does with symmetric memory: inside of the capture it ends its
pool, allocates in another, and begins its own again. Afterwards it looks for the pool's segments."""

import os
import subprocess
import sys
from collections.abc import Callable

import ebbtide
import pytest

PROGRAM = """
import torch
from ebbtide import _core, saver
from torch_memory_saver import torch_memory_saver
def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag
pool, symmetric = torch.cuda.graph_pool_handle(), torch.cuda.MemPool()
static = torch.ones(1 << 20, device="cuda")
graphs = []
for factor in (2, 3):
    graph = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(
        cuda_graph=graph, pool=pool, stream=torch.cuda.Stream(), tag="cuda_graph", enable_cpu_backup=True
    ):
        first = static * factor
        torch._C._cuda_endAllocateToPool(0, pool)
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, symmetric.id)
        between = first + 1
        torch._C._cuda_endAllocateToPool(0, symmetric.id)
        torch._C._cuda_releasePool(0, symmetric.id)
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        last = between * 2
    graphs.append((graph, first, between, last, factor))
    assert tag_of(first) == tag_of(last) == "cuda_graph", (tag_of(first), tag_of(last))
blocks = {block["address"] for one in torch.cuda.memory_snapshot(pool) for block in one["blocks"]}
assert {first.data_ptr(), last.data_ptr()} <= blocks
for turn in range(3):
    torch_memory_saver.pause("cuda_graph")
    assert all(_core.is_away(row[1].data_ptr(), row[1].nbytes) for row in graphs)
    assert saver.tags()["cuda_graph"].resident_bytes == 0
    torch_memory_saver.resume("cuda_graph")
    static.fill_(turn)
    for graph, first, between, last, factor in graphs:
        graph.replay()
        torch.cuda.synchronize()
        assert (last == (turn * factor + 1) * 2).all()
print("done")
"""


@pytest.fixture(params=["preloaded", "not preloaded"])
def run(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Runs a program that uses torch_memory_saver."""

    def in_process(code: str) -> str:
        environment = {**os.environ, **ebbtide.env(compat="tms")}
        if request.param == "not preloaded":
            del environment["LD_PRELOAD"]
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return in_process


def test_the_callers_pool_may_be_left_and_entered_again_inside_of_a_capture(run: Callable[[str], str]) -> None:
    assert run(PROGRAM) == "done\n"
