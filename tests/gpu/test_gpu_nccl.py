"""Two ranks on two GPUs that NCCL connects by legacy CUDA IPC, in programs that can be paused.

With NCCL_CUMEM_ENABLE=0, NCCL allocates its buffers by cudaMalloc and shares them by cudaIpcGetMemHandle, which only
the driver's own memory can do.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.expected_skip("one GPU only, or two that do not reach each other")

PROGRAM = Path(__file__).parent / "programs" / "nccl_pause.py"
NCCL = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_P2P_LEVEL": "SYS",  # whatever lies between the two
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,P2P",
}


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("one GPU only, or two that do not reach each other")


def run_ranks(*options: str) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ebbtide = [sys.executable, "-m", "ebbtide.cli", "run", "--pauseable", *options, "--"]
    variables = {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo"}  # the name of this machine need not resolve
    return subprocess.run(
        [*ebbtide, sys.executable, "-m", *launcher, str(PROGRAM)],
        env={**os.environ, **NCCL, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_nccl_shares_its_buffers_while_torch_is_paused() -> None:
    done = run_ranks()
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert {f"rank {rank} is right" for rank in (0, 1)} <= set(done.stdout.splitlines())
    assert "via P2P/IPC" in done.stdout + done.stderr, "NCCL connected the two by other means"


def test_with_everything_tagged_nccl_is_told_why_it_cannot_share() -> None:
    done = run_ranks("--pauseable-all")
    assert done.returncode != 0, done.stdout
    assert "ebbtide: cuIpcGetMemHandle: memory of the tag 'default' can't be shared" in done.stderr, done.stderr
    assert "EBBTIDE_PAUSEABLE_ALL" in done.stderr
