"""SGLang's own capture of graphs, from its sources: its backend, its graph pool and its adapter, with a forward pass
that does what its symmetric memory does. `make programs` brings the wheel; EBBTIDE_PROGRAMS names another folder."""

import os
import subprocess
import sys
from pathlib import Path

import ebbtide
import pytest
from checks.program_wheels import NOT_THERE, unpack

HELPERS = Path(__file__).resolve().parents[1] / "python"
PROGRAM = """
import sys
sys.path.append({helpers!r})
from types import SimpleNamespace
import torch
import program_sources
class Yes:
    def get(self): return True
class Settings:
    def __getattr__(self, name): return Yes()
def nothing(*_): return None
resources = SimpleNamespace(graph_pool_borrow=None, graph_memory_pool=None)
group = SimpleNamespace(tp_group=SimpleNamespace(barrier=nothing))
named = []
program_sources.serve("sglang", {sources!r}, real=[
    "sglang.srt.constants",
    "sglang.srt.utils.torch_memory_saver_adapter",
    "sglang.srt.model_executor.runner_utils.pool",
    "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend",
], given={{
    "sglang.srt.environ": {{"envs": Settings()}},
    "sglang.srt.runtime_context": {{"get_resources": lambda: resources, "get_parallel": lambda: group}},
    "sglang.srt.utils": {{"get_bool_env_var": lambda name: True, "is_cuda": lambda: True}},
    "sglang.srt.distributed.device_communicators.pynccl_allocator": {{"set_graph_pool_id": named.append}},
}})
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
import sglang.srt.model_executor.runner_utils.pool as graph_pool
"""

# What needs a GPU.
CAPTURES = """
from ebbtide import _core, saver
from torch_memory_saver import torch_memory_saver
backend = FullCudaGraphBackend(SimpleNamespace(device_module=torch.cuda), enable_memory_saver=True)
assert backend._memory_saver_adapter.enabled
symmetric = torch.cuda.MemPool()
static = torch.ones(1 << 20, device="cuda")
def forward(factor):
    first = static * factor
    if torch.cuda.is_current_stream_capturing():  # as SymmetricMemoryContext
        torch._C._cuda_endAllocateToPool(0, named[-1])
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, symmetric.id)
    between = first + 1
    torch._C._cuda_endAllocateToPool(0, symmetric.id)
    torch._C._cuda_releasePool(0, symmetric.id)
    if torch.cuda.is_current_stream_capturing():
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, named[-1])
    return between * 2
with backend.capture_session(torch.cuda.Stream()):
    for factor in (4, 2):
        backend.capture_one(factor, lambda: forward(factor))
for turn in range(3):
    torch_memory_saver.pause("cuda_graph")
    assert all(_core.is_away(each.data_ptr(), each.nbytes) for each in backend._outputs.values())
    assert saver.tags()["cuda_graph"].resident_bytes == 0
    torch_memory_saver.resume("cuda_graph")
    static.fill_(turn)
    for factor in (4, 2):
        output = backend.replay(factor, None)
        torch.cuda.synchronize()
        assert (output == (turn * factor + 1) * 2).all()
runs = graph_pool.find_free_graph_pool_runs(resources.graph_memory_pool)
assert runs and graph_pool.graph_pool_borrow_largest_run() == runs[0][1], runs
backend.cleanup()
print("done")
"""


@NOT_THERE
@pytest.mark.parametrize("is_preloaded", [True, False])
def test_sglangs_captures_with_symmetric_memory_and_a_borrowed_pool(is_preloaded: bool, tmp_path: Path) -> None:
    sources = unpack("sglang", tmp_path)
    environment = {**os.environ, **ebbtide.env(compat="tms")}
    if not is_preloaded:
        del environment["LD_PRELOAD"]
    code = PROGRAM.format(helpers=str(HELPERS), sources=str(sources)) + CAPTURES
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stdout + done.stderr
