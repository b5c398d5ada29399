"""The end of a process is judged by its exit status, because torch can abort in a destructor (csrc/DESIGN.md, F40)."""

from collections.abc import Callable

import pytest

SETUP = """
with saver.region("weights"):
    w = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
with saver.region("kv", backup=None):
    k = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
"""

ENDINGS = {
    "the last thing is a pause": "saver.pause()",
    "paused and then deleted": "saver.pause(); del w, k",
    "an unused tag": "del w, k; import gc; gc.collect(); torch.cuda.empty_cache()",
    "living pools, memory resident": "",
    "inside a region": "region = saver.region('open'); region.__enter__(); z = torch.ones(MIB, device='cuda')",
    "inside nested regions": "\n".join(
        [
            "for name in 'abc':",
            "    saver.region(name).__enter__(); torch.ones(MIB, device='cuda')",
        ]
    ),
    "inside threads=all": "saver.region('open', threads='all').__enter__(); z = torch.ones(MIB, device='cuda')",
    "sys.exit inside a region": "\n".join(["with saver.region('open'):", "    sys.exit(0)"]),
    "a thread inside a region": "\n".join(
        [
            "def body():",
            "    with saver.region('threaded'):",
            "        torch.ones(MIB, device='cuda'); time.sleep(1)",
            "threading.Thread(target=body, daemon=True).start(); time.sleep(0.2)",
        ]
    ),
    "a graph that lives": "\n".join(
        [
            "g = torch.cuda.CUDAGraph()",
            "with saver.cuda_graph(g):",
            "    y = w + 1",
            "saver.pause()",
        ]
    ),
    "a failed capture and open pools": "\n".join(
        [
            "g = torch.cuda.CUDAGraph()",
            "try:",
            "    with saver.cuda_graph(g):",
            "        w.sum().item()",
            "except RuntimeError: pass",
            "saver.region('open').__enter__()",
        ]
    ),
    "tensors kept by a module": "torch.kept = (w, k); saver.pause()",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_exit_status_is_0(program: Callable[..., str], ending: str) -> None:
    program(SETUP + ending)
