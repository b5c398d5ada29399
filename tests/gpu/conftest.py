"""Tests of behaviour that only a GPU can show. Most run in their own process and are judged by its exit status, too."""

import gc
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

_numbers = itertools.count(1)

PRELUDE = """
import sys, threading, time
import torch
from ebbtide import saver
import ebbtide
def free(): torch.cuda.synchronize(); return torch.cuda.mem_get_info()[0]
MIB = 1 << 20
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def program() -> Callable[..., str]:
    """Runs a program with torch, saver, free() and MIB defined. It must end with status 0. Returns its stdout."""

    def run(code: str, timeout: float = 180) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


LMS_PRELUDE = f"""
import faulthandler
faulthandler.enable()
sys.path.insert(0, {str(HERE / "programs")!r})
from lms_training import *
"""


@pytest.fixture
def trial(program: Callable[..., str]) -> Callable[..., str]:
    """Runs a program with what programs/lms_training.py defines."""

    def run(code: str, timeout: float = 120) -> str:
        return program(f"{LMS_PRELUDE}{textwrap.dedent(code)}", timeout=timeout)

    return run


@pytest.fixture
def tag(request: pytest.FixtureRequest) -> str:
    """A tag that no other test uses."""
    return f"gpu-{re.sub(r'[^a-z0-9_]', '_', request.node.name)[:60]}-{next(_numbers)}"


@pytest.fixture
def saver() -> Iterator[object]:
    """`ebbtide.saver` in this process. After the test everything is resident, limits are reset, and unused memory is
    released."""
    torch = pytest.importorskip("torch")
    from ebbtide import saver as module

    yield module
    gc.collect()
    module.configure(device_limit=None, host_limit=None)
    module.resume()
    torch.cuda.empty_cache()
    module.trim()
