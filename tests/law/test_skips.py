"""A test that did not run must not look like one that passed: tests/conftest.py's rules, tried on planted tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PLANTED = """
import pytest

def test_passes(): pass
def test_skips(): pytest.skip("no reason")
@pytest.mark.skip(reason="marked")
def test_is_marked(): pass
@pytest.mark.expected_skip("one GPU is enough")
def test_may_skip(): pytest.skip("one GPU")
@pytest.mark.xfail(reason="known")
def test_fails_as_known(): assert False
"""
CONFIGURATION = "[pytest]\nmarkers =\n  gpu: x\n  sim_only: x\n  expected_skip(reason): x\n  cuda_only(reason): x\n"


def run_planted(root: Path, folder: Path, text: str, **environment: str) -> str:
    """The output of a pytest run over the planted tests with this repository's conftest."""
    shutil.copy(root / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text(CONFIGURATION)
    (folder / "test_planted.py").write_text(text)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EBBTIDE_", "PYTEST_"))}
    variables |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}  # plugins take longer than the tests
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def count_outcomes(output: str) -> dict[str, int]:
    last_line = output.rstrip().splitlines()[-1]
    counts = re.findall(r"(\d+) (passed|failed|skipped|xfailed|deselected|error)", last_line)
    return {outcome: int(count) for count, outcome in counts}


def test_a_skip_is_a_skip_by_default(root: Path, tmp_path: Path) -> None:
    counts = count_outcomes(run_planted(root, tmp_path, PLANTED))
    assert counts == {"passed": 1, "skipped": 3, "xfailed": 1}


def test_an_unexpected_skip_fails_where_none_is_allowed(root: Path, tmp_path: Path) -> None:
    """A marked skip comes before the test's body, so that pytest calls its failure an error."""
    counts = count_outcomes(run_planted(root, tmp_path, PLANTED, EBBTIDE_NO_SKIPS="1"))
    assert counts == {"passed": 1, "failed": 1, "error": 1, "skipped": 1, "xfailed": 1}


def test_a_file_that_skips_itself_fails_where_none_is_allowed(root: Path, tmp_path: Path) -> None:
    text = 'import pytest\npytest.importorskip("no_such_module")\n'
    assert count_outcomes(run_planted(root, tmp_path, text)) == {"skipped": 1}
    assert count_outcomes(run_planted(root, tmp_path, text, EBBTIDE_NO_SKIPS="1")) == {"error": 1}


def test_an_unknown_driver_is_refused(root: Path, tmp_path: Path) -> None:
    assert "use sim, cuda or hip" in run_planted(root, tmp_path, PLANTED, EBBTIDE_TEST_DRIVER="simulator")


def test_gpu_tests_are_shown_as_skipped_on_the_simulator(root: Path, tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.gpu\ndef test_it(): assert False\n@pytest.mark.sim_only\ndef test_sim(): pass\n"
    assert count_outcomes(run_planted(root, tmp_path, text)) == {"passed": 1, "skipped": 1}


def test_rules_of_cuda_are_skipped_with_their_reason_under_hips_names(root: Path, tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.cuda_only('contexts')\ndef test_it(): pass\n"
    assert count_outcomes(run_planted(root, tmp_path, text)) == {"passed": 1}
    output = run_planted(root, tmp_path, text, EBBTIDE_SIM_HIP="1", EBBTIDE_NO_SKIPS="1")
    assert count_outcomes(output) == {"skipped": 1}
