"""torch_memory_saver's own tests, unmodified, against ebbtide's module.

TORCH_MEMORY_SAVER_CHECKOUT names a checkout of it. Its tests of XPU and of its wheels are left out, and two that
measure the memory of the process. test_cpu_backup_rss wants a pause to take as much host memory as its tensor has, and
test_cpu_backup_preload_backend_from_env a resume to give that much back. Their tensors hold one repeated value, for
which ebbtide takes no backup, and it keeps its staging ring, of 32 MiB and more, from the first copy on.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import ebbtide
import pytest

VARIABLE = "TORCH_MEMORY_SAVER_CHECKOUT"
OF_PROCESS_MEMORY = "test_cpu_backup_rss or test_cpu_backup_preload_backend_from_env"
PARTS = {
    "start of subprocesses": ["test_configure_subprocess.py"],
    "utilities": ["test_utils.py"],
    "examples, preload": ["test_examples.py", "-k", f"preload and not xpu and not ({OF_PROCESS_MEMORY})"],
    "examples, torch": ["test_examples.py", "-k", "torch and not preload and not xpu"],
    "examples that choose the mode": [
        *("test_examples.py", "-k"),
        f"not preload and not torch and not xpu and not ({OF_PROCESS_MEMORY})",
    ],
}

pytestmark = [
    pytest.mark.expected_skip(f"{VARIABLE} names no checkout"),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout"),
    pytest.mark.device_memory,
]


@pytest.mark.parametrize("arguments", PARTS.values(), ids=PARTS)
def test_its_own_tests_pass(arguments: list[str], tmp_path: Path) -> None:
    """Only what needs a second device may be skipped, where there is one alone."""
    import torch

    folder = Path(os.environ[VARIABLE], "test").resolve()
    environment = {**os.environ, **ebbtide.env(compat="tms")}
    del environment["LD_PRELOAD"]  # its tests preload the library themselves
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    reasons = set(re.findall(r"^SKIPPED \[\d+\] [^:]+:\d+: (.*)$", done.stdout, re.MULTILINE))
    allowed = {"Multi-device test requires at least two devices"} if torch.cuda.device_count() < 2 else set()
    assert reasons <= allowed
