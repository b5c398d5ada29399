"""The walk's first steps. For a long walk, run `make walk`; `make tools-test` shows that planted faults are found."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")


@pytest.mark.device_memory
def test_short_walks_agree_with_the_model(root):
    # In processes of their own: a walk pauses every tag of the process, and its device is small.
    command = [sys.executable, "-m", "tests.walk.ci"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=550, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
