"""tests/python/test_vllm_upstream.py: a test of vLLM that fails is seen."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_failing_test_of_vllm_is_seen(root: Path, tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text("from ...utils import requires_fp8\ndef test_basic_cumem(): assert False\n")
    runner = str(root / "tests/python/test_vllm_upstream.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", runner, "-k", "test_basic_cumem"],
        env={**os.environ, "EBBTIDE_VLLM_TESTS": str(planted)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "def test_basic_cumem(): assert False" in done.stdout
    assert "1 failed" in done.stdout
