"""A library of another build in the process, as a preloaded one may be, is refused where the package is loaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim_only

ANOTHER = 'const char* ebbtide_build(void) { return "another"; }\n'


def test_a_library_of_another_build_is_refused(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    (tmp_path / "another.c").write_text(ANOTHER)
    library = tmp_path / "another.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "another.c"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", "from ebbtide import _core"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ebbtide's library in this process, "), result.stderr
    assert "is build another, and this package is build " in last and "LD_PRELOAD" in last
    assert subprocess.run(command, env=dict(os.environ), check=False).returncode == 0
