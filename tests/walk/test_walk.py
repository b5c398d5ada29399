"""The walk's first steps. For a long walk, run `make walk`; `make tools-test` shows that planted faults are found."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from walk import CI_STEPS


@pytest.mark.device_memory
@pytest.mark.parametrize(("copy_threads", "arguments"), [("1", []), ("4", ["--waits-may-fail"])])
def test_a_short_walk_agrees_with_the_model(root, copy_threads, arguments):
    # In a process of its own: a walk pauses every tag of the process, and its device is small.
    result = subprocess.run(
        [sys.executable, "-m", "tests.walk", "--steps", str(CI_STEPS), *arguments],
        cwd=root,
        env={**os.environ, "EBBTIDE_COPY_THREADS": copy_threads},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
