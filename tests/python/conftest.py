"""What the Python tests share. They run on the simulated device and, with EBBTIDE_TEST_DRIVER=cuda, on a GPU."""

import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

_numbers = itertools.count(1)

# Free memory that regions cached stays with their pools for the life of the process: room for that of all tests.
os.environ.setdefault("EBBTIDE_SIM_CAPACITY", "4GiB")


@pytest.fixture
def tag(request: pytest.FixtureRequest) -> str:
    """A tag that no other test uses: the core keeps every tag for the life of the process."""
    return f"{re.sub(r'[^a-z0-9_]', '_', request.node.name)[:60]}-{next(_numbers)}"


@pytest.fixture
def tag2(tag: str) -> str:
    """A second one."""
    return f"{tag}-second"


@pytest.fixture(scope="module")
def few_objects_to_collect() -> None:
    """What torch and pytest made until now lives on: looking through it after each test takes longer than most tests."""
    pytest.importorskip("torch")
    gc.collect()
    gc.freeze()


@pytest.fixture
def saver(few_objects_to_collect: None) -> Iterator[object]:
    """`ebbtide.saver`; afterwards all memory is resident again, so that the next test finds nothing away."""
    torch = pytest.importorskip("torch")
    from ebbtide import saver as module

    yield module
    gc.collect()
    module.configure(device_limit=None, host_limit=None)
    module.resume()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a Python of its own: `run_python(code, EBBTIDE_DRIVER="off")`; None unsets the variable."""

    def run(code: str, timeout: float = 120, **environment: str | None) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **environment}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
