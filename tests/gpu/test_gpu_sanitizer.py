"""The kernels under compute-sanitizer, which is part of a CUDA toolkit: no access out of bounds, no race."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kernels_under_sanitizer.py")
SUMMARIES = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)",
}


@pytest.mark.expected_skip("compute-sanitizer comes with the CUDA toolkit, not with the driver")
@pytest.mark.parametrize("tool", SUMMARIES)
def test_the_kernels_are_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    # The core queries functions that the driver may lack. A call that returns an error is no finding.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [sanitizer, "--tool", tool, *options, "--error-exitcode", "3", sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert "content is right" in output
    assert re.search(SUMMARIES[tool], output), output
