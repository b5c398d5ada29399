"""`ebbtide run --lms` on a GPU: a program that knows nothing of it trains within the limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.device_memory


@pytest.fixture
def unmodified():
    """Runs programs/lms_unmodified.py, under `ebbtide run` where there are options. Gives losses and stderr."""

    def run(options, *shape):
        under_run = [sys.executable, "-m", "ebbtide.cli", "run", *options.split(), "--"] if options else []
        program = Path(__file__).parent / "programs" / "lms_unmodified.py"
        done = subprocess.run(
            [*under_run, sys.executable, str(program), *map(str, shape)],
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[:-1], done.stderr

    return run


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ("--lms 2GiB", (12, 1024, 16384)),  # activations leave, of 2.9 GiB in all
        ("--lms 3GiB", (16, 4096, 256)),  # states and weights leave, of 4.5 GiB in all
        ("--lms 4GiB --device-limit 3GiB", (16, 4096, 256)),
    ],
)
def test_an_unmodified_program_has_the_same_losses_under_ebbtide_run(unmodified, options, shape):
    plain, _ = unmodified("", *shape)
    losses, said = unmodified(f"{options} --summary", *shape)
    assert losses == plain and len(losses) == 5
    assert "ebbtide: large model support" in said and "Nothing had to leave" not in said, said
    assert "tag 'overflow'" not in said, said
